#include "engine/write_job.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "base/checked.h"
#include "engine/header_io.h"
#include "format/names.h"
#include "plan/layout.h"
#include "runtime/adopted.h"
#include "runtime/arena.h"
#include "runtime/cuda_copy.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kPartsName = "parts";

struct FileLayout {
  std::string header;
  SourceBytes bytes;  // all of the file, the header included
};

Status CheckBytes(const WriteTensor& tensor, const SourceTensor& source) {
  TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                      ByteSize(tensor.dtype, tensor.shape));
  if (bytes != source.bytes()) {
    return InvalidArgument("has " + std::to_string(source.bytes()) +
                           " bytes in memory, a " + DtypeName(tensor.dtype) +
                           " box of " + tensor.shape.ToString() + " takes " +
                           std::to_string(bytes));
  }
  if (!Inside({tensor.offsets, tensor.shape}, tensor.global_shape)) {
    return InvalidArgument(
        "box " + Box{tensor.offsets, tensor.shape}.ToString() +
        " is not inside the global shape " + tensor.global_shape.ToString());
  }
  return {};
}

Status CheckSource(const WriteTensor& tensor,
                   const std::vector<SourceTensor>& sources) {
  Status checked = tensor.source < sources.size()
                       ? CheckBytes(tensor, sources[tensor.source])
                       : InvalidArgument("has no source");
  return std::move(checked).WithTensor(tensor.name);
}

// Fills `parsed` with what the header says. Takes the names away from `file`.
// `layout` must stay where it is.
Status LayOutData(WriteFile& file, const std::string& id,
                  const std::vector<SourceTensor>& sources, FileHeader* parsed,
                  FileLayout* layout) {
  std::vector<SafetensorsEntry>& entries = parsed->header.tensors;
  entries.reserve(file.tensors.size());
  for (WriteTensor& tensor : file.tensors) {
    TC_RETURN_IF_ERROR(CheckSource(tensor, sources));
    entries.push_back(
        {std::move(tensor.name), tensor.dtype, tensor.shape, 0, 0});
  }
  const std::vector<uint32_t> order = LayOutFile(&entries);
  std::vector<ShardEntry>& shards = parsed->sharding.entries;
  shards.reserve(file.tensors.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const WriteTensor& tensor = file.tensors[order[i]];
    shards.push_back({tensor.offsets, tensor.global_shape});
  }
  TC_ASSIGN_OR_RETURN(
      layout->header,
      BuildSafetensorsHeader(BuildFileMetadata(id, entries, &shards), entries));
  layout->bytes.Reserve(order.size() + 1);
  layout->bytes.Append(layout->header);
  for (const uint32_t i : order) {
    layout->bytes.Append(sources[file.tensors[i].source]);
  }
  parsed->header.data_begin = layout->header.size();
  parsed->header.file_bytes = layout->bytes.size();
  parsed->sharding.file_id = id;
  parsed->sharding.has_sharding_info = true;
  return {};
}

Status LayOutRaw(const WriteFile& file,
                 const std::vector<SourceTensor>& sources, FileLayout* layout) {
  for (size_t index : file.raw) {
    if (index >= sources.size()) return InvalidArgument("has no source");
    layout->bytes.Append(sources[index]);
  }
  return {};
}

// Where the bytes of a file are in memory of a staged state, aligned so that
// they can be written from there; empty where a part is not, or where writing
// so many short stretches would take longer than copying them together.
std::vector<ByteSpan> StagedPlaces(const SourceBytes& file, uint64_t offset,
                                   uint64_t bytes) {
  constexpr size_t kMaxStretches = 16;
  std::vector<ByteSpan> places;
  bool usable = true;
  (void)file.ForEachPart(offset, bytes, [&](const SourcePart& part) -> Status {
    usable = usable && part.dense != nullptr && places.size() <= kMaxStretches;
    if (!usable) return {};
    if (!places.empty() &&
        places.back().data() + places.back().size() == part.dense) {
      places.back() = {places.back().data(), places.back().size() + part.size};
    } else {
      places.push_back({part.dense, part.size});
    }
    return {};
  });
  const auto fits = [](const ByteSpan& place) {
    return reinterpret_cast<uintptr_t>(place.data()) % kDataAlignment == 0 &&
           place.size() % kDataAlignment == 0 &&
           (Arena::Staging().IsLeased(place) ||
            AdoptedMemory::Process().Holds(place));
  };
  if (!usable || places.size() > kMaxStretches ||
      !std::all_of(places.begin(), places.end(), fits)) {
    return {};
  }
  return places;
}

// The short headers of the files of this job: gone again unless it is done.
class StagedHeaders {
 public:
  explicit StagedHeaders(const Directory& staging) : staging_(staging) {}
  StagedHeaders(const StagedHeaders&) = delete;
  StagedHeaders& operator=(const StagedHeaders&) = delete;
  ~StagedHeaders() {
    for (const std::string& staged : staged_) UnstageHeader(staging_, staged);
  }

  Status Stage(const std::string& staged, const FileHeader& file,
               std::string_view text) {
    staged_.push_back(staged);
    return StageHeader(staging_, staged, file, text);
  }
  void Keep() { staged_.clear(); }

 private:
  const Directory& staging_;
  std::vector<std::string> staged_;
};

// Of elements that a piece is cast from, at most: the first and the last may be
// cut. 0 where nothing is cast.
uint64_t BytesToCast(const std::vector<WriteTensor>& tensors) {
  uint64_t most = 0;
  for (const WriteTensor& tensor : tensors) {
    if (!tensor.stored || *tensor.stored == tensor.dtype) continue;
    const auto from = static_cast<uint64_t>(DtypeBits(tensor.dtype));
    const auto to = static_cast<uint64_t>(DtypeBits(*tensor.stored));
    most = std::max(most, kPieceBytes * from / to);
  }
  return most == 0 ? 0 : RoundUp(most, kDataAlignment) + kDataAlignment;
}

}  // namespace

Result<WrittenPlan> RunWriteJob(WritePlan plan,
                                const std::vector<SourceTensor>& sources,
                                Job* job) {
  TC_ASSIGN_OR_RETURN(const Directory staging, Directory::Open(plan.staging));
  StagedHeaders headers(staging);
  std::deque<FileLayout> layouts(plan.files.size());  // which must not move
  std::vector<OutputSpec> specs;
  for (size_t f = 0; f < plan.files.size(); ++f) {
    WriteFile& file = plan.files[f];
    TC_RETURN_IF_ERROR(CheckFileName(file.name));
    const std::string id = NewId();
    const std::string staged = StagedName(file.name, id);
    FileHeader parsed;
    Status laid_out = file.role == FileRole::kData
                          ? LayOutData(file, id, sources, &parsed, &layouts[f])
                          : LayOutRaw(file, sources, &layouts[f]);
    if (!laid_out.ok()) return std::move(laid_out).WithFile(file.name);
    if (file.role == FileRole::kData) {
      TC_RETURN_IF_ERROR(headers.Stage(staged, parsed, layouts[f].header));
    }
    specs.push_back(
        {file.name, staged, id, file.role, layouts[f].bytes.size(), {}});
  }
  FinalWrite finals;
  if (!plan.final_tensors.empty()) {
    for (const WriteTensor& tensor : plan.final_tensors) {
      TC_RETURN_IF_ERROR(CheckSource(tensor, sources));
    }
    TC_ASSIGN_OR_RETURN(finals, PlanFinalWrite(staging, plan.final_tensors,
                                               sources, {plan.rank, job}));
    for (size_t f = 0; f < finals.files.size(); ++f) {
      specs.push_back(finals.files[f]);
      layouts.push_back({{}, std::move(finals.bytes[f])});
    }
    if (finals.parts.size() > 0) {
      const std::string id = NewId();
      specs.push_back({std::string(kPartsName),
                       StagedName(kPartsName, id),
                       id,
                       FileRole::kExtra,
                       finals.parts.size(),
                       {}});
      layouts.push_back({{}, std::move(finals.parts)});
    }
  }
  TC_ASSIGN_OR_RETURN(const DeviceMap devices, DevicesOf(sources));
  // The leader of a ring spends as long on a piece of what many ranks have as
  // on writing it.
  const int workers = std::max(1, plan.options.workers);
  const int ring_workers =
      finals.ring && finals.ring->leads() ? 2 * workers : workers;
  // What goes to a ring and what this rank writes by itself go on at once.
  const int first_own = finals.ring ? ring_workers : 0;
  CudaCopies copies(first_own + workers);
  // A part that a device copies into scratch, to be cast from there.
  struct LateCast {
    SourcePart part;
    const std::byte* elements;
    std::byte* to;
  };
  // Without a digester the bytes are digested afterwards.
  const auto copy = [&](const SourceBytes& bytes, uint64_t offset,
                        MutableByteSpan out, MutableByteSpan scratch,
                        int worker, std::vector<LateCast>* late,
                        SegmentDigester* digester) -> Status {
    std::byte* to = out.data();
    std::byte* elements = scratch.data();
    return bytes.ForEachPart(
        offset, out.size(), [&](const SourcePart& part) -> Status {
          std::byte* const at = to;
          to += part.size;
          if (part.source != nullptr && part.source->device >= 0) {
            CudaDevice* device = devices.at(part.source->device);
            if (part.cast == nullptr) {
              copies.Add(worker, device, part.source->data + part.begin,
                         {at, part.size});
              return {};
            }
            const ElementRange range = CastElementsOf(part);
            const auto each =
                static_cast<uint64_t>(DtypeBits(part.cast->from)) / 8;
            const uint64_t size = (range.last - range.first) * each;
            copies.Add(worker, device, part.source->data + range.first * each,
                       {elements, size});
            late->push_back({part, elements, at});
            elements += size;
            return {};
          }
          if (part.dense == nullptr) {
            GatherPart(part, at);
            if (digester) digester->Add({at, part.size});
          } else if (digester) {
            digester->Copy(at, {part.dense, part.size});
          } else {
            std::memcpy(at, part.dense, part.size);
          }
          return {};
        });
  };
  // Makes the bytes from `offset` on; digests them where there is a digester.
  const auto make = [&](const SourceBytes& bytes, uint64_t offset,
                        MutableByteSpan out, MutableByteSpan scratch,
                        int worker, SegmentDigester* digester) -> Status {
    // Waits however this ends, an exception included: the buffer must not go
    // back while a device writes into it.
    struct Waiter {
      CudaCopies* copies;
      int worker;
      ~Waiter() { (void)copies->Wait(worker); }
    } waiter{&copies, worker};
    const bool on_host = devices.empty();
    std::vector<LateCast> late;
    Status status = copy(bytes, offset, out, scratch, worker, &late,
                         on_host ? digester : nullptr);
    const std::byte* failed = nullptr;  // the file is named by who calls
    if (status.ok()) status = copies.Begin(worker, &failed);
    if (status.ok()) status = copies.Wait(worker);
    if (status.ok() && !on_host) {
      for (const LateCast& each : late) {
        CastPart(each.part, each.elements, CastElementsOf(each.part).first,
                 each.to);
      }
      if (digester) digester->Add(out);
    }
    return status;
  };
  const FillFn fill = [&](size_t file, MutableByteSpan out,
                          MutableByteSpan scratch, int worker,
                          SegmentDigester* digester) -> Status {
    return make(layouts[file].bytes, digester->offset(), out, scratch,
                first_own + worker, digester)
        .WithFile(specs[file].name);
  };
  const PlaceFn place = [&](size_t file, uint64_t offset, uint64_t bytes) {
    return StagedPlaces(layouts[file].bytes, offset, bytes);
  };
  const uint64_t cast_bytes = BytesToCast(plan.final_tensors);
  OutputOptions options = plan.options;
  if (!devices.empty()) {
    options.fill_bytes = kPieceBytes;  // waits once a piece
    options.page_locker = devices.begin()->second;
    options.scratch_bytes = cast_bytes;
  }
  WrittenPlan written;
  std::vector<std::vector<WrittenRange>> ranges;
  const auto write_own = [&]() -> Status {
    TC_ASSIGN_OR_RETURN(
        ranges, WriteOutputs(staging, specs, options, job, fill, place));
    return {};
  };
  std::vector<std::vector<WrittenRange>> by_ring(finals.files.size());
  if (!finals.ring) {
    TC_RETURN_IF_ERROR(write_own());
  } else {
    const RingWork& ring = *finals.ring;
    written.ring_bytes = ring.own().size();
    // Device memory is cast out of a buffer of the worker's own.
    std::vector<std::vector<std::byte>> buffers(
        static_cast<size_t>(ring_workers));
    const RingWork::Make make_own = [&](uint64_t at, MutableByteSpan out,
                                        int worker) -> Status {
      std::vector<std::byte>& buffer = buffers[static_cast<size_t>(worker)];
      if (!devices.empty()) buffer.resize(cast_bytes);
      return make(ring.own(), at, out, buffer, worker, nullptr);
    };
    if (ring.leads()) {
      OutputOptions of_ring = options;
      of_ring.workers = ring_workers;
      of_ring.fill_bytes = kPieceBytes;
      of_ring.scratch_bytes = kPieceBytes;
      of_ring.before_piece = [&](size_t file, uint64_t begin) {
        return ring.Await(file, begin, *job).WithFile(ring.files()[file].name);
      };
      TC_ASSIGN_OR_RETURN(
          by_ring,
          WriteOutputs(
              staging, ring.files(), of_ring, job,
              [&](size_t file, MutableByteSpan out, MutableByteSpan scratch,
                  int worker, SegmentDigester* digester) -> Status {
                return ring.Fill(file, out, scratch, worker, digester, make_own)
                    .WithFile(ring.files()[file].name);
              }));
      TC_RETURN_IF_ERROR(write_own());
    } else {
      // The leader has as much to write as all members send it: this rank's own
      // bytes do not wait for that.
      Status both = ForEachItem(2, 2, nullptr, [&](int64_t item, int) {
        return item == 0 ? ring.Send(ring_workers, job, make_own) : write_own();
      });
      if (!both.ok()) {
        // Its own may be written all the same.
        for (const OutputSpec& spec : specs) {
          if (!spec.ranges) (void)staging.Unlink(spec.staged, true);
        }
        return both;
      }
    }
  }
  for (size_t f = 0; f < specs.size(); ++f) {
    const size_t of_final = f - plan.files.size();
    if (f < plan.files.size()) {
      written.files.push_back({specs[f], std::move(ranges[f][0].crc32c)});
    } else if (of_final < finals.files.size()) {
      ranges[f].insert(ranges[f].end(), by_ring[of_final].begin(),
                       by_ring[of_final].end());
      written.final_files.push_back(
          {static_cast<uint32_t>(of_final), specs[f].id, std::move(ranges[f])});
    } else {
      written.parts = WrittenParts{{specs[f], std::move(ranges[f][0].crc32c)},
                                   std::move(finals.part_bytes),
                                   std::move(finals.part_boxes)};
    }
  }
  headers.Keep();
  return written;
}

}  // namespace torch_ckpt
