#include "engine/read/read_plan.h"

#include <algorithm>

#include "base/checked.h"
#include "engine/open/stored_box.h"
#include "format/cast.h"
#include "plan/clip.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

struct CellRun {
  uint32_t file;
  ReadRun read;
  bool shared;
};

// By cells; every byte of the run must be in one.
Status AddRun(uint32_t file, const Run& run, CastTarget* cast, bool shared,
              std::vector<CellRun>* out) {
  uint64_t planned = 0;
  std::vector<Run> parts;
  const uint64_t end = run.src + run.SrcSpan();
  for (uint64_t cell = RoundDown(run.src, kCellBytes); cell < end;
       cell += kCellBytes) {
    parts.clear();
    ClipRun(run, cell, cell + kCellBytes, &parts);
    for (const Run& part : parts) {
      planned += part.TotalBytes();
      out->push_back({file, {part, cast}, shared});
    }
  }
  if (planned == run.TotalBytes()) return {};
  return Internal("only " + std::to_string(planned) + " of " +
                  std::to_string(run.TotalBytes()) +
                  " bytes would be read: this is a bug of torch_ckpt");
}

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

// The same of a CastTarget, which counts in stored elements from its own start.
Result<StridedBox> CastBox(const UnitView& view, Dtype from,
                           const TargetTensor& target) {
  const Dtype to = *target.cast_to;
  if (!CanCast(from, to)) {
    return Unsupported(std::string("cannot be cast from ") + DtypeName(from) +
                       " to " + DtypeName(to));
  }
  if (view.box.sizes != target.sizes ||
      target.element_bytes * 8 != DtypeBits(to)) {
    return InvalidArgument(
        "the target does not have the shape of the box, or "
        "no elements of " +
        std::string(DtypeName(to)));
  }
  StridedBox box{view.box, 0, target.strides};
  for (int d = 0; d < box.strides.size(); ++d) {
    box.strides[d] = target.strides[d] / target.element_bytes * view.unit_bytes;
  }
  return box;
}

Status PlanTensor(const Checkpoint& checkpoint, const ReadItem& item,
                  const TargetTensor& target, PlannedReads* planned,
                  std::vector<CellRun>* out) {
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
  TC_ASSIGN_OR_RETURN(const UnitView wanted,
                      InUnits(entry.dtype, entry.shape, item.box));
  const bool is_cast = target.cast_to && *target.cast_to != entry.dtype;
  TC_ASSIGN_OR_RETURN(const StridedBox dst,
                      is_cast ? CastBox(wanted, entry.dtype, target)
                              : TargetBox(wanted, target));
  CastTarget* cast = nullptr;
  if (is_cast) {
    cast = &planned->casts.emplace_back(item.name, target.data, entry.dtype,
                                        *target.cast_to);
  }
  uint64_t found = 0;
  TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                      checkpoint.Placements(static_cast<uint32_t>(id),
                                            &item.box, &planned->storages));
  for (const Placement& placement : placements) {
    // Owners tile the tensor; replicas repeat what an owner has.
    if (placement.role == PlacementRole::kReplica) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> boxes,
                        StoredBoxes(entry, placement));
    for (const StridedBox& src : boxes) {
      Run run;
      if (!MakeRun(src, dst, wanted.unit_bytes, &run)) continue;
      found += run.TotalBytes();
      TC_RETURN_IF_ERROR(AddRun(placement.file, run, cast, item.shared, out));
    }
  }
  const auto needed =
      static_cast<uint64_t>(wanted.box.Volume() * wanted.unit_bytes);
  if (found == needed) return {};
  std::vector<Box> boxes;
  for (const Placement& placement : placements) {
    if (placement.role == PlacementRole::kReplica) continue;
    for (Box& box : BoxesOf(placement, entry.shape)) {
      boxes.push_back(std::move(box));
    }
  }
  TC_RETURN_IF_ERROR(ProveDisjoint(boxes));
  TC_RETURN_IF_ERROR(ProveCover(item.box, boxes));
  return Internal("coverage and byte count disagree");
}

Status PlanFile(const Checkpoint& checkpoint, const ReadItem& item,
                const TargetTensor& target, std::vector<CellRun>* out) {
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
  return AddRun(static_cast<uint32_t>(f), run, nullptr, item.shared, out);
}

}  // namespace

Result<PlannedReads> PlanReads(const Checkpoint& checkpoint,
                               const std::vector<ReadItem>& items,
                               const std::vector<TargetTensor>& targets) {
  PlannedReads planned;
  std::vector<CellRun> runs;
  for (const ReadItem& item : items) {
    if (item.target >= targets.size()) {
      return InvalidArgument("has no target").WithTensor(item.name);
    }
    const TargetTensor& target = targets[item.target];
    Status status = item.file.empty()
                        ? PlanTensor(checkpoint, item, target, &planned, &runs)
                        : PlanFile(checkpoint, item, target, &runs);
    if (!status.ok()) {
      return std::move(status).WithTensor(item.name).WithFile(
          checkpoint.path());
    }
  }
  std::sort(runs.begin(), runs.end(), [](const CellRun& a, const CellRun& b) {
    return a.file != b.file ? a.file < b.file : a.read.run.src < b.read.run.src;
  });
  std::vector<ReadCell>& cells = planned.cells;
  for (const CellRun& r : runs) {
    const uint64_t begin = RoundDown(r.read.run.src, kCellBytes);
    if (cells.empty() || cells.back().file != r.file ||
        cells.back().begin != begin) {
      cells.push_back({r.file, begin, false, {}});
    }
    cells.back().runs.push_back(r.read);
    cells.back().shared = cells.back().shared || r.shared;
  }
  return planned;
}

}  // namespace torch_ckpt
