#include "engine/save/final_write.h"

#include <algorithm>

#include "base/checked.h"
#include "format/name_index.h"
#include "plan/runs.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

// Bytes of a tensor in a row in a final file.
struct Row {
  ByteRange bytes;  // of the file
  Origin origin;
  uint64_t from = 0;  // of its bytes
};

// The tensors of all final files by name. The headers must stay where they are.
class FinalTensors {
 private:
  auto NameAt() const {
    return [this](uint32_t id) -> std::string_view {
      return At(places_[id]).name;
    };
  }

 public:
  explicit FinalTensors(const std::vector<FileHeader>& headers)
      : headers_(headers) {
    for (uint32_t f = 0; f < headers.size(); ++f) {
      const size_t count = headers[f].header.tensors.size();
      for (uint32_t e = 0; e < count; ++e) {
        const auto next = static_cast<uint32_t>(places_.size());
        places_.push_back({f, e});
        index_.Insert(At({f, e}).name, next, NameAt());
      }
    }
  }

  const SafetensorsEntry& At(FinalPlace place) const {
    return headers_[place.file].header.tensors[place.entry];
  }

  const FinalPlace* Find(std::string_view name) const {
    const int64_t id = index_.Find(name, NameAt());
    return id < 0 ? nullptr : &places_[static_cast<size_t>(id)];
  }

 private:
  const std::vector<FileHeader>& headers_;
  std::vector<FinalPlace> places_;
  NameIndex index_;
};

std::string Described(Dtype dtype, const Dims& shape) {
  return DtypeName(dtype) + (" " + shape.ToString());
}

Status NotLaidOut(const WriteTensor& tensor) {
  return Conflict("is " + Described(tensor.dtype, tensor.global_shape) +
                  " on this rank, and in none of the files that the "
                  "coordinator has laid out: they are of a plan for other "
                  "tensors")
      .WithTensor(tensor.name);
}

Status CheckFits(const WriteTensor& tensor, const SafetensorsEntry& entry,
                 const StagedFile& file) {
  const Dtype stored = tensor.stored.value_or(tensor.dtype);
  if (entry.dtype == stored && entry.shape == tensor.global_shape &&
      (stored == tensor.dtype || CanCast(tensor.dtype, stored))) {
    return {};
  }
  std::string as;
  if (stored != tensor.dtype) as = std::string(", as ") + DtypeName(stored);
  return Conflict("is " + Described(tensor.dtype, tensor.global_shape) + as +
                  " on this rank, and " + Described(entry.dtype, entry.shape) +
                  " in the header that the coordinator has staged: that is of "
                  "a plan for other tensors")
      .WithTensor(tensor.name)
      .WithFile(file.name);
}

// The rows of a box in its file, where the tensor begins at `base` and is of
// dtype `to`.
Status AddRows(const WriteTensor& tensor, Origin origin, Dtype to,
               uint64_t base, std::vector<Row>* out) {
  TC_ASSIGN_OR_RETURN(
      const UnitView view,
      InUnits(to, tensor.global_shape, {tensor.offsets, tensor.shape}));
  Run run;
  if (!MakeRun({view.box, 0, DenseStrides(view.box.sizes, view.unit_bytes)},
               {Box::Whole(view.shape), base,
                DenseStrides(view.shape, view.unit_bytes)},
               view.unit_bytes, &run)) {
    return {};  // no elements
  }
  SplitBySrcSpan(run, run.bytes, [&](const Run& row) {
    out->push_back({{row.dst, row.dst + row.bytes}, origin, row.src});
  });
  return {};
}

bool ByBegin(const Row& a, const Row& b) {
  return a.bytes.begin < b.bytes.begin;
}

// Sorts the rows of a file into what this rank writes there and what goes to
// its spill. Leaves the former.
Status PlaceRows(std::vector<Row>* rows, uint32_t file, FinalWrite* out) {
  std::sort(rows->begin(), rows->end(), ByBegin);
  Output& output = out->files[file];
  ExtentList own;
  std::vector<ByteRange> ranges;  // of rows that lie side by side
  own.Reserve(rows->size());
  for (const Row& row : *rows) {
    const auto [begin, end] = row.bytes;
    if (begin < own.size()) {
      return Conflict("this rank writes bytes " + std::to_string(begin) +
                      " to " + std::to_string(own.size()) + " twice")
          .WithFile(output.file.name);
    }
    own.Place(begin, end - begin, row.origin, row.from);
    if (ranges.empty() || ranges.back().end != begin) {
      ranges.push_back({begin, begin});
    }
    ranges.back().end = end;
  }
  rows->clear();
  const auto to_spill = [&](uint64_t begin, uint64_t end) {
    if (begin >= end) return;
    out->spill_bytes.push_back({file, {begin, end}, out->spill.size()});
    own.ForEach(begin, end - begin,
                [&](Origin origin, uint64_t from, uint64_t bytes) {
                  out->spill.Place(out->spill.size(), bytes, origin, from);
                });
  };
  for (const ByteRange& range : ranges) {
    const ByteRange inner = Interior(range, output.file.bytes);
    if (inner.begin >= inner.end) {
      to_spill(range.begin, range.end);
      continue;
    }
    output.ranges->push_back(inner);
    to_spill(range.begin, inner.begin);
    to_spill(inner.end, range.end);
    uint64_t at = inner.begin;
    own.ForEach(inner.begin, inner.end - inner.begin,
                [&](Origin origin, uint64_t from, uint64_t bytes) {
                  rows->push_back({{at, at + bytes}, origin, from});
                  at += bytes;
                });
  }
  return {};
}

// Adds what the ring writes into a file, in ranges of its own: its members have
// agreed how these are cut into pieces.
void PlaceRing(RingWork* ring, uint32_t file, std::vector<Row>* rows,
               Output* output) {
  for (const ByteRange& range : ring->RangesOf(file)) {
    output->ranges->push_back(range);
  }
  std::sort(
      output->ranges->begin(), output->ranges->end(),
      [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  ring->ForEachTensor(file, [&](uint64_t index, const ByteRange& bytes) {
    rows->push_back({bytes, {ring, index}, 0});
  });
  std::sort(rows->begin(), rows->end(), ByBegin);
}

// Makes the plan of one rank, step by step.
class FinalPlanner {
 public:
  FinalPlanner(const Directory& staging, MemorySources* memory,
               const FinalWriteOptions& options)
      : staging_(staging), memory_(memory), options_(options) {}

  // The files that the coordinator has laid out, as their headers say.
  Status ReadHeaders() {
    TC_ASSIGN_OR_RETURN(list_, ReadFinalFiles(staging_));
    for (const StagedFile& file : list_.files) {
      TC_ASSIGN_OR_RETURN(FileHeader header,
                          ReadStagedHeader(staging_, file.staged));
      if (header.sharding.file_id != file.id) {
        return Conflict("is not the file that the coordinator has laid out")
            .WithFile(staging_.Join(file.staged));
      }
      Output output{file, {}, std::vector<ByteRange>()};
      output.file.bytes = header.header.file_bytes;
      out_.files.push_back(std::move(output));
      headers_.push_back(std::move(header));
    }
    rows_.resize(list_.files.size());
    return {};
  }

  // Where each box goes: into the file, or to where it is gathered.
  Status PlaceTensors(const std::vector<WriteTensor>& tensors) {
    const FinalTensors places(headers_);
    for (const WriteTensor& tensor : tensors) {
      const FinalPlace* place = places.Find(tensor.name);
      if (!place) return NotLaidOut(tensor);
      const SafetensorsEntry& entry = places.At(*place);
      TC_RETURN_IF_ERROR(CheckFits(tensor, entry, list_.files[place->file]));
      const Box box{tensor.offsets, tensor.shape};
      if (box.Empty()) continue;
      TC_RETURN_IF_ERROR(
          PlaceTensor(tensor, *place, entry).WithTensor(tensor.name));
    }
    return {};
  }

  // What is gathered: by the ring, or by the coordinator.
  Status PlaceGathered() {
    std::vector<RingEdge> edges;
    if (ring_) {
      TC_ASSIGN_OR_RETURN(
          out_.ring, PlanRingWork(staging_, list_, headers_, *ring_, gathered_,
                                  options_.rank, options_.job, &edges));
    }
    ExtentList& spill = out_.spill;
    for (const RingSource& source : gathered_) {
      if (out_.ring && source.band.ring >= 0) continue;
      out_.spill_boxes.push_back(
          {std::string(source.name), source.box, spill.size()});
      spill.Append(source.origin, source.bytes);
    }
    for (const RingEdge& edge : edges) {
      out_.spill_bytes.push_back({edge.file, edge.range, spill.size()});
      spill.Place(spill.size(), edge.range.end - edge.range.begin,
                  gathered_[edge.source].origin, edge.from);
    }
    return {};
  }

  Result<FinalWrite> Finish() && {
    for (uint32_t f = 0; f < list_.files.size(); ++f) {
      TC_RETURN_IF_ERROR(PlaceRows(&rows_[f], f, &out_));
      Output& file = out_.files[f];
      if (out_.ring && out_.ring->leads()) {
        PlaceRing(out_.ring.get(), f, &rows_[f], &file);
      }
      file.extents.Reserve(rows_[f].size());
      for (const Row& row : rows_[f]) {
        file.extents.Place(row.bytes.begin, row.bytes.end - row.bytes.begin,
                           row.origin, row.from);
      }
    }
    return std::move(out_);
  }

 private:
  Status PlaceTensor(const WriteTensor& tensor, FinalPlace place,
                     const SafetensorsEntry& entry) {
    std::optional<ElementCast> cast;
    if (tensor.dtype != entry.dtype) {
      cast = {tensor.dtype, entry.dtype, tensor.name};
    }
    const Origin origin = memory_->Of(tensor.source, cast);
    const Box box{tensor.offsets, tensor.shape};
    TC_ASSIGN_OR_RETURN(const FinalBand* const band, list_.BandOf(place, box));
    if (!band) {
      return AddRows(tensor, origin, entry.dtype,
                     headers_[place.file].header.data_begin + entry.begin,
                     &rows_[place.file]);
    }
    if (band->ring >= 0) {
      const FinalRing* own = &list_.rings[static_cast<size_t>(band->ring)];
      if (ring_ && ring_ != own) {
        return Conflict("it is planned that another node has this box");
      }
      ring_ = own;
    }
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        ByteSize(entry.dtype, tensor.shape));
    gathered_.push_back({place, tensor.name, box, *band, origin, bytes});
    return {};
  }

  const Directory& staging_;
  MemorySources* const memory_;
  const FinalWriteOptions& options_;
  FinalFiles list_;
  std::vector<FileHeader> headers_;
  std::vector<std::vector<Row>> rows_;  // by file
  std::vector<RingSource> gathered_;
  const FinalRing* ring_ = nullptr;
  FinalWrite out_;
};

}  // namespace

Result<FinalWrite> PlanFinalWrite(const Directory& staging,
                                  const std::vector<WriteTensor>& tensors,
                                  MemorySources* memory,
                                  const FinalWriteOptions& options) {
  FinalPlanner planner(staging, memory, options);
  TC_RETURN_IF_ERROR(planner.ReadHeaders());
  TC_RETURN_IF_ERROR(planner.PlaceTensors(tensors));
  TC_RETURN_IF_ERROR(planner.PlaceGathered());
  return std::move(planner).Finish();
}

}  // namespace torch_ckpt
