#include "engine/write_job.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "engine/header_io.h"
#include "format/names.h"
#include "plan/layout.h"
#include "plan/ranges.h"
#include "plan/runs.h"
#include "runtime/cuda_copy.h"

namespace torch_ckpt {
namespace {

// A stretch of a file: header text or a source.
struct Extent {
  uint64_t begin = 0;
  uint64_t end = 0;
  const SourceTensor* source = nullptr;  // null: header text
  bool dense = false;
};

struct FileLayout {
  std::string header;
  std::vector<Extent> extents;  // ascending, without gaps
};

bool IsDense(const SourceTensor& source) {
  int64_t expected = source.element_bytes;
  for (int d = source.sizes.size() - 1; d >= 0; --d) {
    if (source.sizes[d] == 0) return true;
    if (source.sizes[d] != 1 && source.strides[d] != expected) return false;
    expected *= source.sizes[d];
  }
  return true;
}

uint64_t SourceBytes(const SourceTensor& source) {
  return static_cast<uint64_t>(source.sizes.Product()) *
         static_cast<uint64_t>(source.element_bytes);
}

Status CheckSource(const WriteTensor& tensor, const SourceTensor& source) {
  TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                      ByteSize(tensor.dtype, tensor.shape));
  if (bytes != SourceBytes(source)) {
    return InvalidArgument("has " + std::to_string(SourceBytes(source)) +
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

// Fills `parsed` with what the header says. Takes the names away from `file`.
Result<FileLayout> LayOutData(WriteFile& file, const std::string& id,
                              const std::vector<SourceTensor>& sources,
                              FileHeader* parsed) {
  std::vector<SafetensorsEntry>& entries = parsed->header.tensors;
  entries.reserve(file.tensors.size());
  for (WriteTensor& tensor : file.tensors) {
    Status checked = tensor.source < sources.size()
                         ? CheckSource(tensor, sources[tensor.source])
                         : InvalidArgument("has no source");
    if (!checked.ok()) return std::move(checked).WithTensor(tensor.name);
    entries.push_back(
        {std::move(tensor.name), tensor.dtype, tensor.shape, 0, 0});
  }
  const std::vector<uint32_t> order = LayOutFile(&entries);
  std::vector<ShardEntry>& shards = parsed->sharding.entries;
  shards.reserve(file.tensors.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const WriteTensor& tensor = file.tensors[order[i]];
    if (!file.sharded && !(tensor.shape == tensor.global_shape)) {
      return InvalidArgument("is a part " +
                             Box{tensor.offsets, tensor.shape}.ToString() +
                             " of " + tensor.global_shape.ToString() +
                             "; a final file holds whole tensors: use "
                             "save_distributed=True")
          .WithTensor(entries[i].name);
    }
    shards.push_back({tensor.offsets, tensor.global_shape});
  }
  FileLayout layout;
  TC_ASSIGN_OR_RETURN(
      layout.header,
      BuildSafetensorsHeader(
          BuildFileMetadata(id, entries, file.sharded ? &shards : nullptr),
          entries));
  layout.extents.reserve(order.size() + 1);
  layout.extents.push_back({0, layout.header.size(), nullptr, true});
  for (size_t i = 0; i < order.size(); ++i) {
    if (entries[i].begin == entries[i].end) continue;
    const SourceTensor& source = sources[file.tensors[order[i]].source];
    layout.extents.push_back({layout.header.size() + entries[i].begin,
                              layout.header.size() + entries[i].end, &source,
                              IsDense(source)});
  }
  parsed->header.data_begin = layout.header.size();
  parsed->header.file_bytes = layout.extents.back().end;
  parsed->sharding.file_id = id;
  parsed->sharding.has_sharding_info = file.sharded;
  return layout;
}

Result<FileLayout> LayOutRaw(const WriteFile& file,
                             const std::vector<SourceTensor>& sources) {
  FileLayout layout;
  uint64_t at = 0;
  for (size_t index : file.raw) {
    if (index >= sources.size()) return InvalidArgument("has no source");
    const SourceTensor& source = sources[index];
    const uint64_t bytes = SourceBytes(source);
    if (bytes == 0) continue;
    layout.extents.push_back({at, at + bytes, &source, IsDense(source)});
    at += bytes;
  }
  return layout;
}

// Elements of a strided source, in row-major order, from byte `begin` of that
// order on.
void GatherElements(const SourceTensor& source, uint64_t begin,
                    MutableByteSpan out) {
  const auto unit = static_cast<uint64_t>(source.element_bytes);
  const Dims order = DenseStrides(source.sizes, source.element_bytes);
  for (const Box& box :
       BoxesOfRange(source.sizes, static_cast<int64_t>(begin / unit),
                    static_cast<int64_t>((begin + out.size()) / unit))) {
    StridedBox src{box, 0, source.strides};
    StridedBox dst{box, 0, order};
    for (int d = 0; d < box.rank(); ++d) {
      src.base += static_cast<uint64_t>(box.offsets[d] * source.strides[d]);
      dst.base += static_cast<uint64_t>(box.offsets[d] * order[d]);
    }
    Run run;
    if (MakeRun(src, dst, source.element_bytes, &run)) {
      CopyRun(run, source.data, 0, out.data(), begin);
    }
  }
}

// Bytes of the extent from `begin` on, for an extent that has them in a row in
// host memory; null for others.
const std::byte* DenseBytes(const FileLayout& layout, const Extent& extent,
                            uint64_t begin) {
  if (!extent.source) return AsBytes(layout.header).data() + begin;
  return extent.dense ? extent.source->data + begin : nullptr;
}

// Copies bytes [begin, begin + out.size()) of a strided extent.
void GatherExtent(const Extent& extent, uint64_t begin, MutableByteSpan out) {
  const SourceTensor& source = *extent.source;
  // A segment may cut an element (3-byte units, odd offsets): gather whole
  // elements and take the part.
  const auto unit = static_cast<uint64_t>(source.element_bytes);
  const uint64_t first = begin / unit * unit;
  const uint64_t last = (begin + out.size() + unit - 1) / unit * unit;
  if (first == begin && last == begin + out.size()) {
    GatherElements(source, begin, out);
    return;
  }
  std::vector<std::byte> whole(last - first);
  GatherElements(source, first, whole);
  std::memcpy(out.data(), whole.data() + (begin - first), out.size());
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

using DeviceMap = std::map<int, CudaDevice*>;

// The devices that sources lie on; checks what a device copy needs.
Result<DeviceMap> DevicesOf(const std::vector<SourceTensor>& sources) {
  DeviceMap devices;
  for (const SourceTensor& source : sources) {
    if (source.device < 0 || SourceBytes(source) == 0) continue;
    if (!IsDense(source)) {
      return InvalidArgument(
          "a tensor on a device is not contiguous; its owner gathers it");
    }
    if (devices.count(source.device) != 0) continue;
    TC_ASSIGN_OR_RETURN(devices[source.device],
                        CudaDevice::Process(source.device));
  }
  return devices;
}

}  // namespace

Result<std::vector<WrittenFile>> RunWriteJob(
    WritePlan plan, const std::vector<SourceTensor>& sources, Job* job) {
  TC_ASSIGN_OR_RETURN(const Directory staging, Directory::Open(plan.staging));
  StagedHeaders headers(staging);
  std::vector<FileLayout> layouts;
  std::vector<OutputSpec> specs;
  for (WriteFile& file : plan.files) {
    TC_RETURN_IF_ERROR(CheckFileName(file.name));
    const std::string id = NewId();
    const std::string staged = StagedName(file.name, id);
    FileHeader parsed;
    Result<FileLayout> layout = file.role == FileRole::kData
                                    ? LayOutData(file, id, sources, &parsed)
                                    : LayOutRaw(file, sources);
    if (!layout.ok()) return layout.status().WithFile(file.name);
    if (file.role == FileRole::kData) {
      TC_RETURN_IF_ERROR(headers.Stage(staged, parsed, layout->header));
    }
    layouts.push_back(std::move(layout).value());
    const std::vector<Extent>& extents = layouts.back().extents;
    specs.push_back({file.name, staged, id, file.role,
                     extents.empty() ? 0 : extents.back().end});
  }
  TC_ASSIGN_OR_RETURN(const DeviceMap devices, DevicesOf(sources));
  CudaCopies copies(plan.options.workers);
  // Without a digester the bytes are digested afterwards.
  const auto copy = [&](size_t file, uint64_t offset, MutableByteSpan out,
                        int worker, SegmentDigester* digester) -> Status {
    const FileLayout& layout = layouts[file];
    auto extent = std::upper_bound(
        layout.extents.begin(), layout.extents.end(), offset,
        [](uint64_t at, const Extent& e) { return at < e.end; });
    while (!out.empty()) {
      const uint64_t size =
          std::min<uint64_t>(out.size(), extent->end - offset);
      const uint64_t begin = offset - extent->begin;
      if (extent->source && extent->source->device >= 0) {
        TC_RETURN_IF_ERROR(
            copies.Begin(worker, devices.at(extent->source->device),
                         extent->source->data + begin, out.first(size)));
      } else if (const std::byte* bytes = DenseBytes(layout, *extent, begin)) {
        if (digester) {
          digester->Copy(out.data(), {bytes, size});
        } else {
          std::memcpy(out.data(), bytes, size);
        }
      } else {
        GatherExtent(*extent, begin, out.first(size));
        if (digester) digester->Add(out.first(size));
      }
      out = out.subspan(size);
      offset += size;
      ++extent;
    }
    return {};
  };
  const FillFn fill = [&](size_t file, MutableByteSpan out, MutableByteSpan,
                          int worker, SegmentDigester* digester) -> Status {
    // Waits however this ends, an exception included: the buffer must not go
    // back while a device writes into it.
    struct Waiter {
      CudaCopies* copies;
      int worker;
      ~Waiter() { (void)copies->Wait(worker); }
    } waiter{&copies, worker};
    const bool on_host = devices.empty();
    Status status = copy(file, digester->offset(), out, worker,
                         on_host ? digester : nullptr);
    if (status.ok()) status = copies.Wait(worker);
    if (status.ok() && !on_host) digester->Add(out);
    return std::move(status).WithFile(specs[file].name);
  };
  OutputOptions options = plan.options;
  if (!devices.empty()) {
    options.fill_bytes = kPieceBytes;  // waits once a piece
    options.page_locker = devices.begin()->second;
  }
  TC_ASSIGN_OR_RETURN(auto digests,
                      WriteOutputs(staging, specs, options,
                                   /*existing=*/false, {}, job, fill));
  std::vector<WrittenFile> written;
  for (size_t f = 0; f < specs.size(); ++f) {
    written.push_back({specs[f], std::move(digests[f])});
  }
  headers.Keep();
  return written;
}

}  // namespace torch_ckpt
