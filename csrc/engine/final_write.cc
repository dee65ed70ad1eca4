#include "engine/final_write.h"

#include <algorithm>

#include "base/checked.h"
#include "format/cast.h"
#include "format/name_index.h"
#include "plan/runs.h"

namespace torch_ckpt {
namespace {

// Bytes of a source in a row in a final file.
struct Stretch {
  uint64_t begin = 0;  // in the file
  uint64_t bytes = 0;
  const SourceTensor* source = nullptr;
  uint64_t from = 0;  // of its bytes in row-major order, after the cast
  std::optional<ElementCast> cast;
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
                 const FinalFile& file) {
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

std::optional<ElementCast> CastOf(const WriteTensor& tensor, Dtype to) {
  if (tensor.dtype == to) return std::nullopt;
  return ElementCast{tensor.dtype, to};
}

// The stretches of a box in its file, where the tensor begins at `base` and is
// of dtype `to`.
Status AddStretches(const WriteTensor& tensor, const SourceTensor& source,
                    Dtype to, uint64_t base, std::vector<Stretch>* out) {
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
  SplitBySrcSpan(run, run.bytes, [&](const Run& piece) {
    out->push_back(
        {piece.dst, piece.bytes, &source, piece.src, CastOf(tensor, to)});
  });
  return {};
}

// Sorts the stretches of a file into what this rank writes there and what goes
// to its parts.
Status PlaceStretches(std::vector<Stretch>* stretches, uint32_t file,
                      FinalWrite* out) {
  std::sort(
      stretches->begin(), stretches->end(),
      [](const Stretch& a, const Stretch& b) { return a.begin < b.begin; });
  OutputSpec& spec = out->files[file];
  SourceBytes& bytes = out->bytes[file];
  std::vector<ByteRange> rows;
  bytes.Reserve(stretches->size());
  for (const Stretch& stretch : *stretches) {
    if (stretch.begin < bytes.size()) {
      return Conflict("this rank writes bytes " +
                      std::to_string(stretch.begin) + " to " +
                      std::to_string(bytes.size()) + " twice")
          .WithFile(spec.name);
    }
    bytes.Place(stretch.begin, *stretch.source, stretch.from, stretch.bytes,
                stretch.cast);
    if (rows.empty() || rows.back().end != stretch.begin) {
      rows.push_back({stretch.begin, stretch.begin});
    }
    rows.back().end += stretch.bytes;
  }
  const auto to_parts = [&](uint64_t begin, uint64_t end) -> Status {
    if (begin >= end) return {};
    out->part_bytes.push_back({file, {begin, end}, out->parts.size()});
    return bytes.ForEachPart(
        begin, end - begin, [&](const SourcePart& part) -> Status {
          out->parts.Place(
              out->parts.size(), *part.source, part.begin, part.size,
              part.cast ? std::optional(*part.cast) : std::nullopt);
          return {};
        });
  };
  for (const ByteRange& row : rows) {
    const ByteRange own = Interior(row, spec.bytes);
    if (own.begin < own.end) {
      spec.ranges->push_back(own);
      TC_RETURN_IF_ERROR(to_parts(row.begin, own.begin));
      TC_RETURN_IF_ERROR(to_parts(own.end, row.end));
    } else {
      TC_RETURN_IF_ERROR(to_parts(row.begin, row.end));
    }
  }
  return {};
}

}  // namespace

Result<FinalWrite> PlanFinalWrite(const Directory& staging,
                                  const std::vector<WriteTensor>& tensors,
                                  const std::vector<SourceTensor>& sources,
                                  const FinalWriteOptions& options) {
  TC_ASSIGN_OR_RETURN(const FinalFiles list, ReadFinalFiles(staging));
  std::vector<FileHeader> headers;
  FinalWrite out;
  for (const FinalFile& file : list.files) {
    TC_ASSIGN_OR_RETURN(FileHeader header,
                        ReadStagedHeader(staging, file.staged));
    if (header.sharding.file_id != file.id) {
      return Conflict("is not the file that the coordinator has laid out")
          .WithFile(staging.Join(file.staged));
    }
    out.files.push_back({file.name, file.staged, file.id, FileRole::kData,
                         header.header.file_bytes, std::vector<ByteRange>()});
    headers.push_back(std::move(header));
  }
  const FinalTensors places(headers);
  std::vector<std::vector<Stretch>> stretches(list.files.size());
  std::vector<RingSource> ring_sources;
  const FinalRing* ring = nullptr;
  for (const WriteTensor& tensor : tensors) {
    const FinalPlace* place = places.Find(tensor.name);
    if (!place) return NotLaidOut(tensor);
    const SafetensorsEntry& entry = places.At(*place);
    TC_RETURN_IF_ERROR(CheckFits(tensor, entry, list.files[place->file]));
    const SourceTensor& source = sources[tensor.source];
    const Dtype to = entry.dtype;
    const Box box{tensor.offsets, tensor.shape};
    if (box.Empty()) continue;
    const auto of_box = list.BandOf(*place, box);
    if (!of_box.ok()) return of_box.status().WithTensor(tensor.name);
    const FinalBand* const band = *of_box;
    if (!band) {
      TC_RETURN_IF_ERROR(
          AddStretches(tensor, source, to,
                       headers[place->file].header.data_begin + entry.begin,
                       &stretches[place->file])
              .WithTensor(tensor.name));
      continue;
    }
    if (band->ring >= 0) {
      const FinalRing* own = &list.rings[static_cast<size_t>(band->ring)];
      if (ring && ring != own) {
        return Conflict("it is planned that another node has this box")
            .WithTensor(tensor.name);
      }
      ring = own;
    }
    TC_ASSIGN_OR_RETURN(const uint64_t bytes, ByteSize(to, tensor.shape));
    ring_sources.push_back(
        {*place, tensor.name, box, *band, &source, bytes, CastOf(tensor, to)});
  }
  std::vector<RingEdge> edges;
  if (ring) {
    TC_ASSIGN_OR_RETURN(
        out.ring, PlanRingWork(staging, list, headers, *ring, ring_sources,
                               options.rank, options.job, &edges));
  }
  for (const RingSource& gathered : ring_sources) {
    if (out.ring && gathered.band.ring >= 0) continue;
    out.part_boxes.push_back(
        {std::string(gathered.name), gathered.box, out.parts.size()});
    out.parts.Place(out.parts.size(), *gathered.source, 0, gathered.bytes,
                    gathered.cast);
  }
  for (const RingEdge& edge : edges) {
    const RingSource& of = ring_sources[edge.source];
    out.part_bytes.push_back({edge.file, edge.range, out.parts.size()});
    out.parts.Place(out.parts.size(), *of.source, edge.from,
                    edge.range.end - edge.range.begin, of.cast);
  }
  out.bytes.resize(list.files.size());
  for (uint32_t f = 0; f < list.files.size(); ++f) {
    TC_RETURN_IF_ERROR(PlaceStretches(&stretches[f], f, &out));
  }
  return out;
}

}  // namespace torch_ckpt
