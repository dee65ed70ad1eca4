#include "engine/open/stored_view.h"

#include <algorithm>
#include <utility>

#include "engine/open/stored_box.h"

namespace torch_ckpt {
namespace {

// Of views that are kept, or so many of any size: what the workers of a job
// come back to. More is no use, since jobs go through the entries in order.
constexpr uint64_t kMostMemory = uint64_t{8} << 20;
constexpr size_t kLeast = 2;

int64_t UnitAt(const Dims& offsets, const Dims& strides) {
  int64_t unit = 0;
  for (int d = 0; d < offsets.size(); ++d) unit += offsets[d] * strides[d];
  return unit;
}

// Behind the last unit of a box that is not empty.
int64_t PastUnit(const Box& box, const Dims& strides) {
  int64_t last = UnitAt(box.offsets, strides);
  for (int d = 0; d < box.rank(); ++d) last += (box.sizes[d] - 1) * strides[d];
  return last + 1;
}

}  // namespace

Result<StoredViewPtr> StoredView::Make(const CatalogEntry& entry,
                                       std::span<const Placement> placements,
                                       Resolve resolve,
                                       FindStorage find_storage) {
  TC_ASSIGN_OR_RETURN(UnitView whole, InUnits(entry.dtype, entry.shape,
                                              Box::Whole(entry.shape)));
  std::shared_ptr<StoredView> view(new StoredView(entry, std::move(whole)));
  view->resolve_ = std::move(resolve);
  view->find_storage_ = std::move(find_storage);
  struct Held {
    PlacedBox placed;
    StridedBox box;
  };
  std::vector<Held> held;
  for (const Placement& placement : placements) {
    // Replicas repeat what an owner has.
    if (placement.role == PlacementRole::kReplica) continue;
    const bool archived = placement.kind == PlacementKind::kArchive;
    TC_ASSIGN_OR_RETURN(std::vector<StridedBox> boxes,
                        StoredBoxes(entry.dtype, entry.shape, placement));
    for (StridedBox& box : boxes) {
      if (box.box.Empty()) continue;
      held.push_back(
          {{archived ? view->archives_.size() : box.base,
            UnitAt(box.box.offsets, view->strides_),
            PastUnit(box.box, view->strides_), placement.file, archived},
           std::move(box)});
    }
    if (archived) view->archives_.push_back({placement, std::nullopt, {}});
  }
  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) {
    return a.placed.first < b.placed.first;
  });
  int64_t past = 0;
  view->boxes_.reserve(held.size());
  view->numbers_.reserve(held.size() * 3 * static_cast<size_t>(view->rank()));
  view->archives_.shrink_to_fit();
  for (auto& [placed, box] : held) {
    past = std::max(past, placed.past);
    placed.past = past;
    view->boxes_.push_back(placed);
    for (const Dims* dims : {&box.box.offsets, &box.box.sizes, &box.strides}) {
      view->numbers_.insert(view->numbers_.end(), dims->begin(), dims->end());
    }
  }
  return StoredViewPtr(std::move(view));
}

uint64_t StoredView::memory() const {
  return sizeof *this + boxes_.size() * sizeof(PlacedBox) +
         numbers_.size() * sizeof(int64_t) + archives_.size() * sizeof(Archive);
}

StridedBox StoredView::BoxOf(size_t at) const {
  const int rank = this->rank();
  const int64_t* number = numbers_.data() + at * 3 * static_cast<size_t>(rank);
  StridedBox out;
  out.base = boxes_[at].base;
  for (Dims* dims : {&out.box.offsets, &out.box.sizes, &out.strides}) {
    for (int d = 0; d < rank; ++d) dims->push_back(*number++);
  }
  return out;
}

std::vector<StoredView::StoredBox> StoredView::Boxes() const {
  std::vector<StoredBox> out;
  const std::lock_guard lock(mutex_);
  for (size_t at = 0; at < boxes_.size(); ++at) {
    const PlacedBox& placed = boxes_[at];
    if (!placed.archived) {
      out.push_back({placed.file, BoxOf(at)});
    } else if (archives_[placed.base].box) {
      out.push_back({placed.file, *archives_[placed.base].box});
    }
  }
  return out;
}

Result<StridedBox> StoredView::LookInto(size_t archive,
                                        DigestedRange* storage) const {
  Archive& at = archives_[archive];
  {
    const std::lock_guard lock(mutex_);
    if (at.box) {
      *storage = at.storage;
      return *at.box;
    }
  }
  // Two threads that meet it first both look: neither waits for the other.
  TC_ASSIGN_OR_RETURN(const Resolved found, resolve_(at.placement));
  TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> boxes,
                      StoredBoxes(dtype_, shape_, found.placement));
  const std::lock_guard lock(mutex_);
  at.box = boxes.at(0);
  at.storage = found.storage;
  *storage = at.storage;
  return *at.box;
}

Status StoredView::AddRuns(std::span<const StridedBox> wanted, int64_t first,
                           int64_t past, std::vector<StoredRun>* runs,
                           std::vector<DigestedRange>* storages) const {
  auto placed = std::partition_point(
      boxes_.begin(), boxes_.end(),
      [&](const PlacedBox& each) { return each.past <= first; });
  uint64_t found = 0, needed = 0;
  for (; placed != boxes_.end() && placed->first < past; ++placed) {
    StridedBox box = BoxOf(static_cast<size_t>(placed - boxes_.begin()));
    if (std::none_of(wanted.begin(), wanted.end(), [&](const StridedBox& to) {
          return !Intersect(box.box, to.box).Empty();
        })) {
      continue;
    }
    DigestedRange storage;
    if (placed->archived) {
      TC_ASSIGN_OR_RETURN(box, LookInto(placed->base, &storage));
    } else if (find_storage_) {
      storage = find_storage_(placed->file, box.base);
    }
    if (storage.crc32 != 0) storages->push_back(storage);
    for (const StridedBox& to : wanted) {
      Run run;
      if (!MakeRun(box, to, whole_.unit_bytes, &run)) continue;
      found += run.TotalBytes();
      runs->push_back({placed->file, run});
    }
  }
  for (const StridedBox& to : wanted) {
    needed += static_cast<uint64_t>(to.box.Volume() * whole_.unit_bytes);
  }
  if (found == needed) return {};
  return Internal(std::to_string(found) + " of " + std::to_string(needed) +
                  " bytes are in the files: this is a bug of torch_ckpt")
      .WithTensor(name_);
}

Status StoredView::RunsOfBox(const StridedBox& to, std::vector<StoredRun>* runs,
                             std::vector<DigestedRange>* storages) const {
  if (to.box.Empty()) return {};
  return AddRuns({&to, 1}, UnitAt(to.box.offsets, strides_),
                 PastUnit(to.box, strides_), runs, storages);
}

Status StoredView::RunsOfBytes(uint64_t from, uint64_t to, uint64_t dst,
                               std::vector<StoredRun>* runs,
                               std::vector<DigestedRange>* storages) const {
  // A piece of an output cuts a unit only where the layout is not aligned to it
  // (3-byte units): such edges are a few bytes of one box each.
  const auto unit = static_cast<uint64_t>(whole_.unit_bytes);
  if (from % unit != 0) {
    const uint64_t cut = std::min(to, from / unit * unit + unit);
    TC_RETURN_IF_ERROR(AddCutUnit(from, cut, dst, runs, storages));
    dst += cut - from;
    from = cut;
  }
  if (to % unit != 0 && from < to) {
    const uint64_t cut = to / unit * unit;
    TC_RETURN_IF_ERROR(AddCutUnit(cut, to, dst + (cut - from), runs, storages));
    to = cut;
  }
  if (from >= to) return {};
  const auto first = static_cast<int64_t>(from / unit);
  const auto past = static_cast<int64_t>(to / unit);
  const Dims strides = DenseStrides(whole_.shape, whole_.unit_bytes);
  std::vector<StridedBox> wanted;
  for (Box& box : BoxesOfRange(whole_.shape, first, past)) {
    const auto before =
        static_cast<uint64_t>(UnitAt(box.offsets, strides_) - first);
    wanted.push_back({std::move(box), dst + before * unit, strides});
  }
  return AddRuns(wanted, first, past, runs, storages);
}

Status StoredView::AddCutUnit(uint64_t from, uint64_t to, uint64_t dst,
                              std::vector<StoredRun>* runs,
                              std::vector<DigestedRange>* storages) const {
  const auto unit = static_cast<uint64_t>(whole_.unit_bytes);
  const auto first = static_cast<int64_t>(from / unit);
  const Box one = BoxesOfRange(whole_.shape, first, first + 1)[0];
  const StridedBox all{one, dst, DenseStrides(one.sizes, whole_.unit_bytes)};
  TC_RETURN_IF_ERROR(AddRuns({&all, 1}, first, first + 1, runs, storages));
  Run& run = runs->back().run;  // that of the unit
  run.src += from % unit;
  run.bytes = to - from;
  return {};
}

std::shared_ptr<StoredViews::LateView> StoredViews::Use(uint32_t entry) {
  const std::lock_guard lock(mutex_);
  const auto [found, added] = kept_.try_emplace(entry);
  Kept& kept = found->second;
  if (added) {
    kept.place = recent_.insert(recent_.begin(), entry);
  } else {
    recent_.splice(recent_.begin(), recent_, kept.place);
  }
  return kept.late;
}

void StoredViews::Count(uint32_t entry, const LateView* late, uint64_t memory) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(entry);
  if (found == kept_.end() || found->second.late.get() != late) return;
  found->second.memory = memory;
  memory_ += memory;
  while (memory_ > kMostMemory && recent_.size() > kLeast) {
    const auto last = kept_.find(recent_.back());
    memory_ -= last->second.memory;
    kept_.erase(last);
    recent_.pop_back();
  }
}

Result<StoredViewPtr> StoredViews::Get(uint32_t entry, const Make& make) {
  const std::shared_ptr<LateView> late = Use(entry);
  const std::lock_guard making(late->making);
  if (!late->view) {
    TC_ASSIGN_OR_RETURN(late->view, make());
    Count(entry, late.get(), late->view->memory());
  }
  return late->view;
}

}  // namespace torch_ckpt
