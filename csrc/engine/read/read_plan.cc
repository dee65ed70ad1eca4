#include "engine/read/read_plan.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "plan/clip.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

// Target strides of the box in units. Flat views (sub-byte tensors that only
// exist whole) need dense memory.
Result<StridedBox> TargetBox(const UnitView& view, const TargetTensor& target) {
  StridedBox box{view.box, reinterpret_cast<uint64_t>(target.data),
                 target.strides};
  if (view.unit_bytes == target.element_bytes &&
      view.box.sizes == target.sizes) {
    return box;
  }
  uint64_t dense = static_cast<uint64_t>(target.element_bytes);
  for (int d = target.sizes.size() - 1; d >= 0; --d) {
    if (target.sizes[d] != 1 &&
        target.strides[d] != static_cast<int64_t>(dense)) {
      return Unsupported("needs a contiguous target");
    }
    dense *= static_cast<uint64_t>(target.sizes[d]);
  }
  if (dense != static_cast<uint64_t>(view.box.Volume() * view.unit_bytes)) {
    return InvalidArgument("the target holds " + std::to_string(dense) +
                           " bytes, the box takes " +
                           std::to_string(view.box.Volume() * view.unit_bytes));
  }
  box.strides = DenseStrides(view.box.sizes, view.unit_bytes);
  return box;
}

// Whether the elements of a unit are apart in the target, or units do not begin
// at whole numbers of them.
bool IsSpread(Dtype dtype, const TargetTensor& target) {
  const int64_t unit = DtypeUnit(dtype).elements;
  const int last = target.sizes.size() - 1;
  for (int d = 0; unit > 1 && d <= last; ++d) {
    const int64_t stride = target.strides[d] / target.element_bytes;
    if (target.sizes[d] > 1 && (d == last ? stride != 1 : stride % unit != 0)) {
      return true;
    }
  }
  return false;
}

// The same of a CastTarget, which counts in stored units from its own start, or
// in elements where these are spread. REQUIRES: !CutsUnits.
Result<StridedBox> CastBox(const UnitView& view, const Box& item, Dtype from,
                           const TargetTensor& target) {
  const Dtype to = *target.cast_to;
  if (item.sizes != target.sizes || target.element_bytes * 8 != DtypeBits(to)) {
    return InvalidArgument(
        "the target does not have the shape of the box, or "
        "no elements of " +
        std::string(DtypeName(to)));
  }
  const int64_t unit = DtypeUnit(from).elements;
  const bool spread = IsSpread(from, target);
  StridedBox box{view.box, 0, target.strides};
  const int last = box.strides.size() - 1;
  for (int d = 0; d <= last; ++d) {
    const int64_t stride = target.strides[d] / target.element_bytes;
    if (spread) {
      box.strides[d] = d == last ? stride * unit : stride;
    } else {
      box.strides[d] =
          (unit > 1 && d == last ? 1 : stride / unit) * view.unit_bytes;
    }
  }
  return box;
}

// Whether elements of one unit are in the box and outside.
bool CutsUnits(Dtype dtype, const Box& box) {
  const int64_t unit = DtypeUnit(dtype).elements;
  const int last = box.rank() - 1;
  return unit > 1 &&
         (box.offsets[last] % unit != 0 || box.sizes[last] % unit != 0);
}

// With all elements of the units that it touches.
Box WithWholeUnits(Dtype dtype, Box box) {
  const int64_t unit = DtypeUnit(dtype).elements;
  const int last = box.rank() - 1;
  const int64_t past = box.offsets[last] + box.sizes[last];
  box.offsets[last] -= box.offsets[last] % unit;
  box.sizes[last] = (past + unit - 1) / unit * unit - box.offsets[last];
  return box;
}

Detour DetourOf(const Box& box, const Box& whole, const TargetTensor& target) {
  Detour detour;
  detour.memory.resize(
      static_cast<size_t>(whole.Volume() * target.element_bytes));
  const StridedBox from{whole, 0,
                        DenseStrides(whole.sizes, target.element_bytes)};
  MakeRun(from, {box, 0, target.strides}, target.element_bytes, &detour.home);
  return detour;
}

}  // namespace

Status PlannedReads::AddTensor(const Checkpoint& checkpoint,
                               const ReadItem& item,
                               const TargetTensor& target) {
  const Catalog& catalog = checkpoint.catalog();
  const int64_t id = catalog.Find(item.name);
  if (id < 0) return Incomplete("is not in the checkpoint");
  const CatalogEntry& entry = catalog.entries()[static_cast<size_t>(id)];
  if (entry.kind == EntryKind::kObject) {
    return InvalidArgument("is not a tensor in the checkpoint");
  }
  if (!Inside(item.box, entry.shape)) {
    return InvalidArgument("box " + item.box.ToString() +
                           " is not inside the stored shape " +
                           entry.shape.ToString());
  }
  TC_ASSIGN_OR_RETURN(const StoredViewPtr stored,
                      checkpoint.View(static_cast<uint32_t>(id)));
  const ScaledTensor* const scaled =
      checkpoint.FindScaled(static_cast<uint32_t>(id));
  if (scaled != nullptr) {
    return AddScaled(*scaled, entry, item, target, *stored);
  }
  TC_ASSIGN_OR_RETURN(const UnitView wanted,
                      InUnits(entry.dtype, entry.shape, item.box));
  if (!target.cast_to || *target.cast_to == entry.dtype) {
    TC_ASSIGN_OR_RETURN(const StridedBox to, TargetBox(wanted, target));
    return AddRuns(*stored, to);
  }
  if (!CanCast(entry.dtype, *target.cast_to)) {
    return Unsupported(std::string("cannot be cast from ") +
                       DtypeName(entry.dtype) + " to " +
                       DtypeName(*target.cast_to));
  }
  TC_ASSIGN_OR_RETURN(const StridedBox to,
                      CastBox(wanted, item.box, entry.dtype, target));
  AddCast(item, target, entry, nullptr);
  return AddRuns(*stored, to);
}

// Numbers of codes.
Status PlannedReads::AddScaled(const ScaledTensor& scaled,
                               const CatalogEntry& entry, const ReadItem& item,
                               const TargetTensor& target,
                               const StoredView& stored) {
  if (!target.cast_to ||
      !CanScale(entry.dtype, scaled.scale_dtype, *target.cast_to)) {
    return Unsupported("is stored as " + std::string(DtypeName(entry.dtype)) +
                       ", to be multiplied by '" + scaled.scales +
                       "': that is read as F64, F32, BF16 or F16");
  }
  if (item.box.sizes != target.sizes) {
    return InvalidArgument("the target does not have the shape of the box");
  }
  if (item.box.Empty()) return {};
  Box box = item.box;
  TargetTensor into = target;
  std::optional<Detour> detour;
  if (CutsUnits(entry.dtype, item.box)) {
    box = WithWholeUnits(entry.dtype, item.box);
    into.sizes = box.sizes;
    into.strides = DenseStrides(box.sizes, target.element_bytes);
    detour = DetourOf(item.box, box, target);
  }
  TC_ASSIGN_OR_RETURN(const UnitView wanted,
                      InUnits(entry.dtype, entry.shape, box));
  TC_ASSIGN_OR_RETURN(const StridedBox to,
                      CastBox(wanted, box, entry.dtype, into));
  std::optional<int64_t> spread;
  if (IsSpread(entry.dtype, into)) {
    if (into.sizes.size() > kMaxDims - 2) {
      return Unsupported("has too many dimensions for a target like this");
    }
    spread = into.strides[into.sizes.size() - 1];
  }
  // First, which looks into archives.
  TC_RETURN_IF_ERROR(AddRuns(stored, to));
  TC_ASSIGN_OR_RETURN(StoredPlaces places, StoredPlaces::Of(stored));
  const auto scales = std::make_shared<Scales>(scaled.scale_dtype, entry.shape,
                                               scaled.blocks, box);
  scales_.push_back(
      {scaled.scales, StoredScales(scaled, scales->held()), scales});
  auto codes = std::unique_ptr<const CodesTarget>(
      new CodesTarget{scales, std::move(places), std::move(detour), spread});
  AddCast(item, target, entry, std::move(codes));
  return {};
}

void PlannedReads::AddCast(const ReadItem& item, const TargetTensor& target,
                           const CatalogEntry& entry,
                           std::unique_ptr<const CodesTarget> codes) {
  // Not emplace_back, whose symbol would pass for one of ours.
  casts_.push_back(std::unique_ptr<CastTarget>(new CastTarget(
      item.name, target.data, entry.dtype, *target.cast_to, std::move(codes))));
  deliveries_.back().cast = casts_.back().get();
}

Status PlannedReads::AddRuns(const StoredView& stored, const StridedBox& to) {
  std::vector<StoredRun> runs;
  TC_RETURN_IF_ERROR(stored.RunsOfBox(to, &runs, &storages_));
  for (const StoredRun& each : runs) TC_RETURN_IF_ERROR(AddRun(each));
  return {};
}

Status PlannedReads::AddFile(const Checkpoint& checkpoint, const ReadItem& item,
                             const TargetTensor& target) {
  const int64_t f = checkpoint.file_set()->FindFile(item.file);
  if (f < 0) {
    return Incomplete("is no file of the checkpoint").WithFile(item.file);
  }
  const uint64_t bytes = checkpoint.files()[static_cast<size_t>(f)].bytes;
  const auto size =
      static_cast<uint64_t>(target.sizes.Product() * target.element_bytes);
  if (size != bytes || target.sizes.size() != 1 ||
      target.strides[0] != target.element_bytes) {
    return InvalidArgument("the target does not hold the " +
                           std::to_string(bytes) + " bytes of the file");
  }
  if (size == 0) return {};
  Run run;
  run.dst = reinterpret_cast<uint64_t>(target.data);
  run.bytes = size;
  return AddRun({static_cast<uint32_t>(f), run});
}

Status PlannedReads::AddRun(const StoredRun& stored) {
  const Run& run = stored.run;
  uint64_t planned = 0;
  const uint64_t end = run.src + run.SrcSpan();
  for (uint64_t piece = RoundDown(run.src, kFetchBytes); piece < end;
       piece += kFetchBytes) {
    clipped_.clear();
    ClipRun(run, piece, piece + kFetchBytes, &clipped_);
    for (const Run& inside : clipped_) {
      planned += inside.TotalBytes();
      Keep(stored.file, inside);
    }
  }
  bytes_ += planned;
  if (planned == run.TotalBytes()) return {};
  return Internal("only " + std::to_string(planned) + " of " +
                  std::to_string(run.TotalBytes()) +
                  " bytes would be read: this is a bug of torch_ckpt");
}

void PlannedReads::Keep(uint32_t file, const Run& run) {
  runs_.push_back({run.src, run.dst,
                   run.loops > 0 ? loops_.size() | kLoops : run.bytes, file,
                   static_cast<uint32_t>(deliveries_.size() - 1)});
  if (run.loops == 0) return;
  loops_.push_back(static_cast<int64_t>(run.bytes));
  loops_.push_back(run.loops);
  for (size_t l = 0; l < static_cast<size_t>(run.loops); ++l) {
    loops_.push_back(run.count[l]);
    loops_.push_back(run.src_stride[l]);
    loops_.push_back(run.dst_stride[l]);
  }
}

Run PlannedReads::RunOf(const CompactRun& compact) const {
  Run run;
  run.src = compact.src;
  run.dst = compact.dst;
  run.bytes = compact.bytes;
  if ((compact.bytes & kLoops) == 0) return run;
  size_t at = compact.bytes & ~kLoops;
  run.bytes = static_cast<uint64_t>(loops_[at++]);
  run.loops = static_cast<int>(loops_[at++]);
  for (size_t l = 0; l < static_cast<size_t>(run.loops); ++l) {
    run.count[l] = loops_[at++];
    run.src_stride[l] = loops_[at++];
    run.dst_stride[l] = loops_[at++];
  }
  return run;
}

ReadPiece PlannedReads::Piece(size_t piece) const {
  const size_t first = pieces_[piece];
  const size_t past = piece + 1 < size() ? pieces_[piece + 1] : runs_.size();
  ReadPiece out;
  out.file = runs_[first].file;
  out.runs.reserve(past - first);
  for (size_t i = first; i < past; ++i) {
    const Delivery& delivery = deliveries_[runs_[i].item];
    out.runs.push_back({RunOf(runs_[i]), delivery.cast});
    out.shared = out.shared || delivery.shared;
  }
  return out;
}

void PlannedReads::MakePieces() {
  std::sort(runs_.begin(), runs_.end(),
            [](const CompactRun& a, const CompactRun& b) {
              return a.file != b.file ? a.file < b.file : a.src < b.src;
            });
  for (size_t i = 0; i < runs_.size(); ++i) {
    if (i > 0 && runs_[i].file == runs_[i - 1].file &&
        runs_[i].src / kFetchBytes == runs_[i - 1].src / kFetchBytes) {
      continue;
    }
    pieces_.push_back(i);
  }
}

Result<PlannedReads> PlannedReads::Make(
    const Checkpoint& checkpoint, const std::vector<ReadItem>& items,
    const std::vector<TargetTensor>& targets) {
  PlannedReads planned;
  planned.deliveries_.reserve(items.size());
  for (const ReadItem& item : items) {
    if (item.target >= targets.size()) {
      return InvalidArgument("has no target").WithTensor(item.name);
    }
    planned.deliveries_.push_back({nullptr, item.shared});
    const TargetTensor& target = targets[item.target];
    Status status = item.file.empty()
                        ? planned.AddTensor(checkpoint, item, target)
                        : planned.AddFile(checkpoint, item, target);
    if (!status.ok()) {
      return std::move(status).WithTensor(item.name).WithFile(
          checkpoint.path());
    }
  }
  planned.MakePieces();
  SortRanges(&planned.storages_);
  return planned;
}

}  // namespace torch_ckpt
