#include "engine/read/item_reads.h"

#include <cstring>
#include <string>
#include <utility>

namespace torch_ckpt {

namespace {

// Scales that are in memory at once, before what they scale: an eighth of that,
// or less.
constexpr uint64_t kScaleBytes = uint64_t{64} << 20;

// What is read of a checkpoint, and where it goes.
struct Wanted {
  std::vector<ReadItem> items;
  std::vector<TargetTensor> targets;
};

// What a plan needs of scales.
Wanted WantedScales(const PlannedReads& planned, bool shared) {
  Wanted out;
  for (const PlannedReads::WantedScales& wanted : planned.scales()) {
    ReadItem item;
    item.name = wanted.name;
    item.box = wanted.box;
    item.target = out.targets.size();
    item.shared = shared;  // small, and near to those of others
    out.items.push_back(std::move(item));
    const MutableByteSpan bytes = wanted.scales->bytes();
    TargetTensor target;
    target.data = bytes.data();
    target.sizes = wanted.box.sizes;
    target.element_bytes =
        static_cast<int64_t>(bytes.size()) / wanted.box.Volume();
    target.strides = DenseStrides(target.sizes, target.element_bytes);
    out.targets.push_back(target);
  }
  return out;
}

// How the numbers of a tensor are made; null of one that has none. `unit`:
// elements that its codes are counted in.
const ScaledTensor* ScaledOf(const Checkpoint& checkpoint,
                             const std::string& name, int64_t* unit) {
  const int64_t entry = checkpoint.catalog().Find(name);
  if (entry < 0) return nullptr;
  const auto e = static_cast<uint32_t>(entry);
  *unit = DtypeUnit(checkpoint.catalog().entries()[e].dtype).elements;
  return checkpoint.FindScaled(e);
}

// Of the scales that an item needs.
uint64_t ScaleBytesOf(const Checkpoint& checkpoint, const ReadItem& item) {
  int64_t unit = 1;
  const ScaledTensor* const scaled = ScaledOf(checkpoint, item.name, &unit);
  if (scaled == nullptr || item.box.rank() != scaled->blocks.size()) return 0;
  const int64_t count = BoxOfScales(item.box, scaled->blocks).Volume();
  return static_cast<uint64_t>(count * DtypeBits(scaled->scale_dtype)) / 8;
}

// Adds an item of numbers so that what cuts a unit of codes is small: the first
// and the last column by themselves, where a unit is in the box in part.
void AddByUnits(const Checkpoint& checkpoint, const ReadItem& item,
                const std::vector<TargetTensor>& targets, Wanted* out) {
  int64_t unit = 1;
  if (ScaledOf(checkpoint, item.name, &unit) == nullptr) unit = 1;
  const int last = item.box.rank() - 1;
  const TargetTensor& target = targets[item.target];
  std::vector<int64_t> cuts = {0};
  if (unit > 1 && last >= 0 && target.sizes == item.box.sizes) {
    const int64_t begin = item.box.offsets[last], size = item.box.sizes[last];
    const int64_t head = (unit - begin % unit) % unit;
    const int64_t tail = (begin + size) % unit;
    if (head > 0 && head < size) cuts.push_back(head);
    if (tail > 0 && size - tail > cuts.back()) cuts.push_back(size - tail);
  }
  for (size_t c = 0; c < cuts.size(); ++c) {
    ReadItem part = item;
    part.target = out->targets.size();
    TargetTensor into = target;
    if (cuts.size() > 1) {
      const int64_t past =
          c + 1 < cuts.size() ? cuts[c + 1] : item.box.sizes[last];
      part.box.offsets[last] += cuts[c];
      part.box.sizes[last] = into.sizes[last] = past - cuts[c];
      into.data += cuts[c] * into.strides[last];
    }
    out->items.push_back(std::move(part));
    out->targets.push_back(into);
  }
}

TargetTensor TargetAt(const TargetTensor& whole, const StridedBox& part) {
  TargetTensor target = whole;
  target.data = reinterpret_cast<std::byte*>(part.base);
  target.sizes = part.box.sizes;
  target.strides = part.strides;
  return target;
}

// Adds to `out` the parts of an item, and to `zeros` what has none.
Status AddParts(const DerivedTensor& derived, const ReadItem& item,
                const TargetTensor& target, Wanted* out,
                std::vector<TargetTensor>* zeros) {
  const StridedBox wanted{item.box, reinterpret_cast<uint64_t>(target.data),
                          target.strides};
  std::vector<StridedBox> boxes;
  int64_t left = item.box.Volume();
  for (const MappedPart& part : derived.parts) {
    boxes.clear();
    MapBox(part.pair, wanted, &boxes);
    for (const StridedBox& box : boxes) {
      left -= box.box.Volume();
      if (part.stored.empty()) {
        zeros->push_back(TargetAt(target, box));
        continue;
      }
      out->items.push_back(
          {part.stored, box.box, "", out->targets.size(), item.shared});
      out->targets.push_back(TargetAt(target, box));
    }
  }
  if (left == 0) return {};
  return Internal(std::to_string(left) +
                  " elements would not be read: this is a bug of torch_ckpt")
      .WithTensor(item.name);
}

// Items of a mapped checkpoint as items of what it is mapped from.
Result<Wanted> AsStored(const Checkpoint& checkpoint,
                        const std::vector<ReadItem>& items,
                        const std::vector<TargetTensor>& targets,
                        std::vector<TargetTensor>* zeros) {
  Wanted out;
  for (const ReadItem& item : items) {
    if (item.target >= targets.size()) {
      return InvalidArgument("has no target").WithTensor(item.name);
    }
    const TargetTensor& target = targets[item.target];
    const DerivedTensor* const derived =
        item.file.empty() ? checkpoint.FindDerived(item.name) : nullptr;
    if (derived == nullptr) {
      ReadItem same = item;
      same.target = out.targets.size();
      out.items.push_back(std::move(same));
      out.targets.push_back(target);
      continue;
    }
    const auto entry =
        static_cast<size_t>(checkpoint.catalog().Find(item.name));
    const Dims& shape = checkpoint.catalog().entries()[entry].shape;
    if (!Inside(item.box, shape) || item.box.sizes != target.sizes) {
      return InvalidArgument("box " + item.box.ToString() +
                             " is not inside the shape " + shape.ToString() +
                             ", or not that of the target")
          .WithTensor(item.name);
    }
    TC_RETURN_IF_ERROR(AddParts(*derived, item, target, &out, zeros));
  }
  return out;
}

void FillWithZeros(const TargetTensor& target, int dim, std::byte* data) {
  if (dim == target.sizes.size()) {
    std::memset(data, 0, static_cast<size_t>(target.element_bytes));
    return;
  }
  for (int64_t i = 0; i < target.sizes[dim]; ++i) {
    FillWithZeros(target, dim + 1, data + i * target.strides[dim]);
  }
}

}  // namespace

Result<ItemReads> ItemReads::Plan(
    const std::shared_ptr<const Checkpoint>& checkpoint,
    const std::vector<ReadItem>& items,
    const std::vector<TargetTensor>& targets, bool neighbours) {
  if (!checkpoint->mapped_from()) {
    ItemReads reads(checkpoint, neighbours);
    TC_RETURN_IF_ERROR(reads.AddGroups(items, targets));
    return reads;
  }
  std::vector<TargetTensor> zeros;
  TC_ASSIGN_OR_RETURN(const Wanted stored,
                      AsStored(*checkpoint, items, targets, &zeros));
  TC_ASSIGN_OR_RETURN(ItemReads reads,
                      Plan(checkpoint->mapped_from(), stored.items,
                           stored.targets, neighbours));
  reads.zeros_.insert(reads.zeros_.end(), zeros.begin(), zeros.end());
  return reads;
}

Status ItemReads::AddGroups(const std::vector<ReadItem>& items,
                            const std::vector<TargetTensor>& targets) {
  const auto add = [&](const std::vector<ReadItem>& of_group,
                       const std::vector<TargetTensor>& into) -> Status {
    TC_ASSIGN_OR_RETURN(PlannedReads planned,
                        PlannedReads::Make(*checkpoint_, of_group, into));
    bytes_ += planned.bytes();
    for (const auto& each : planned.scales()) {
      bytes_ += each.scales->size();
    }
    groups_.push_back(std::move(planned));
    return {};
  };
  if (!checkpoint_->as_stored()) return add(items, targets);
  Wanted group;
  uint64_t held = 0;
  for (const ReadItem& item : items) {
    if (item.target >= targets.size()) {
      return InvalidArgument("has no target").WithTensor(item.name);
    }
    const uint64_t bytes = ScaleBytesOf(*checkpoint_, item);
    if (held > 0 && held + bytes > kScaleBytes) {
      TC_RETURN_IF_ERROR(add(group.items, group.targets));
      group = Wanted();
      held = 0;
    }
    held += bytes;
    AddByUnits(*checkpoint_, item, targets, &group);
  }
  return add(group.items, group.targets);
}

Status ItemReads::ReadScales(const PlannedReads& planned,
                             const Deliver& deliver) const {
  if (planned.scales().empty()) return {};
  const Wanted scales = WantedScales(planned, neighbours_);
  TC_ASSIGN_OR_RETURN(const PlannedReads reads,
                      PlannedReads::Make(*checkpoint_->as_stored(),
                                         scales.items, scales.targets));
  return deliver(reads);
}

Status ItemReads::Run(const Deliver& deliver, Status* lost) {
  for (PlannedReads& planned : groups_) {
    TC_RETURN_IF_ERROR(ReadScales(planned, deliver));
    TC_RETURN_IF_ERROR(deliver(planned));
    for (const auto& each : planned.casts()) {
      Status finished = each->Finish();
      if (lost->ok()) *lost = std::move(finished);
    }
    planned = PlannedReads();  // and its scales
  }
  for (const TargetTensor& zeros : zeros_) FillWithZeros(zeros, 0, zeros.data);
  return {};
}

}  // namespace torch_ckpt
