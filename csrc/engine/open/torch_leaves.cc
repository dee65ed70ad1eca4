#include "engine/open/torch_leaves.h"

#include <algorithm>
#include <utility>

#include "engine/open/torch_archive.h"
#include "format/json.h"
#include "format/torch/dtensor.h"
#include "format/torch/unread.h"
#include "plan/mesh.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kRootPath = "[]";

// What the rank had of it: boxes of the whole, each in its place in the local
// tensor.
Status PlaceDTensor(const TorchArchive& archive, const TorchRebuild& rebuild,
                    Budget* budget, TorchLeaf* leaf) {
  TC_ASSIGN_OR_RETURN(const TorchDTensor found,
                      ReadTorchDTensor(rebuild, budget));
  const Result<std::vector<LocalBox>> boxes =
      ExpandRule(found.shape, found.rule, found.coordinate, budget);
  if (boxes.status().kind() == ErrorKind::kExhausted) return boxes.status();
  if (!boxes.ok()) {
    return Corrupt("is a DTensor whose placements are impossible: " +
                   boxes.status().message());
  }
  // As much again is what it is compared by, and encoded as.
  if (!budget->Keep(boxes->size() * 2 * sizeof(Placement)) ||
      !budget->Touch(found.local.storage.size())) {
    return budget->Over();
  }
  TC_ASSIGN_OR_RETURN(const StoredView::Resolved placed,
                      archive.Find(found.local));
  const Placement& local = placed.placement;
  leaf->storage = placed.storage;
  leaf->dtype = found.local.dtype;
  leaf->shape = found.shape;
  uint64_t elements = 0;
  for (const LocalBox& each : *boxes) {
    Placement placement = local;
    placement.box = each.box;
    for (int d = 0; d < each.local_offset.size(); ++d) {
      if (d >= found.local.shape.size() ||
          each.local_offset[d] + each.box.sizes[d] > found.local.shape[d]) {
        elements = UINT64_MAX;  // larger than what is there
        break;
      }
      placement.offset +=
          static_cast<uint64_t>(each.local_offset[d] * local.strides[d]);
    }
    if (elements == UINT64_MAX) break;
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        ByteSize(leaf->dtype, each.box.sizes));
    elements += bytes;
    leaf->placements.push_back(std::move(placement));
  }
  TC_ASSIGN_OR_RETURN(const uint64_t there,
                      ByteSize(leaf->dtype, found.local.shape));
  if (elements == there) return {};
  // DTensor.from_local makes such of what its caller says.
  return Unsupported("is a DTensor of shape " + found.shape.ToString() +
                     " whose part of shape " + found.local.shape.ToString() +
                     " is not what its placements say");
}

Status PlaceTensor(const TorchArchive& archive, const PickleValue& value,
                   Budget* budget, TorchLeaf* leaf) {
  const TorchRebuild rebuild = FindTorchRebuild(value);
  if (IsTorchDTensor(rebuild)) {
    return PlaceDTensor(archive, rebuild, budget, leaf);
  }
  TC_ASSIGN_OR_RETURN(const TorchTensor tensor, ReadTorchTensor(value));
  if (!budget->Touch(tensor.storage.size())) return budget->Over();
  TC_ASSIGN_OR_RETURN(StoredView::Resolved placed, archive.Find(tensor));
  leaf->dtype = tensor.dtype;
  leaf->shape = tensor.shape;
  leaf->storage = placed.storage;
  leaf->placements.push_back(std::move(placed.placement));
  return {};
}

}  // namespace

Result<TorchLeaves> FindTorchLeaves(const File& file, ByteRange range,
                                    bool listed) {
  TC_ASSIGN_OR_RETURN(const TorchArchive archive,
                      TorchArchive::Open(file, range, kMaxObjectPickle));
  if (!listed && archive.root().Is(PickleKind::kList)) {
    return Unsupported("holds a list and no state dict");
  }
  TorchLeaves out;
  Budget& budget = out.left = archive.MakeBudget();
  TC_ASSIGN_OR_RETURN(TorchState state, FlattenState(archive.root(), &budget));
  Budget looks = archive.MakeBudget();
  out.range = range;
  out.containers = std::move(state.containers);
  out.leaves.reserve(state.leaves.size());
  for (StateLeaf& leaf : state.leaves) {
    TorchLeaf& found = out.leaves.emplace_back();
    found.name = std::move(leaf.name);
    found.path = std::move(leaf.path);
    if (!IsTorchTensor(*leaf.value)) {
      if (IsAnyTensor(*leaf.value)) {
        found.unread = DescribeUnread(*leaf.value, {});
      } else if (std::string why = FindHiddenTensor(*leaf.value, &looks);
                 !why.empty()) {
        found.unread = {"?", std::nullopt, std::move(why)};
      }
      continue;
    }
    Status placed = PlaceTensor(archive, *leaf.value, &budget, &found);
    found.is_tensor = placed.ok();
    if (placed.ok()) continue;
    if (placed.kind() == ErrorKind::kUnsupported) {
      found.unread = DescribeUnread(*leaf.value, placed.message());
      continue;
    }
    return std::move(placed).WithTensor(found.name);
  }
  return out;
}

TorchLeavesAdder::Place TorchLeavesAdder::PlaceOf(uint32_t number,
                                                  const TorchLeaf& leaf) {
  std::vector<int64_t> numbers;
  const auto append = [&](const Dims& dims) {
    numbers.push_back(dims.size());
    numbers.insert(numbers.end(), dims.begin(), dims.end());
  };
  append(leaf.shape);
  for (const Placement& each : leaf.placements) {
    numbers.push_back(static_cast<int64_t>(each.offset));
    append(each.box.offsets);
    append(each.box.sizes);
    append(each.strides);
  }
  return {number, leaf.dtype, std::move(numbers)};
}

Result<uint32_t> TorchLeavesAdder::AddTensor(uint32_t number,
                                             const TorchLeaf& leaf,
                                             Budget* left) {
  // Those of which nothing is here have nothing in common.
  if (!leaf.placements.empty()) {
    const auto [tied, fresh] =
        places_.try_emplace(PlaceOf(number, leaf), leaf.name);
    if (!fresh) {
      // A name for each that is tied to it.
      if (!left->Keep(tied->second.size())) {
        return left->Over().WithTensor(leaf.name);
      }
      return catalog_->AddAlias(leaf.name, tied->second);
    }
  }
  TC_ASSIGN_OR_RETURN(const uint32_t entry,
                      catalog_->AddTensor(leaf.name, leaf.dtype, leaf.shape));
  for (Placement placement : leaf.placements) {
    placement.file = number;
    TC_RETURN_IF_ERROR(catalog_->AddPlacement(entry, placement));
  }
  if (leaf.storage.crc32 != 0) {
    storages_.push_back(leaf.storage);
    storages_.back().file = number;
  }
  return entry;
}

// As of the ranks of a save: the first says the kind, keys are united.
void TorchLeavesAdder::AddContainer(const StateContainer& container) {
  const auto [at, fresh] =
      by_path_.try_emplace(container.path, containers_.size());
  if (fresh) {
    containers_.push_back(container);
    keys_.emplace_back();
    return;
  }
  StateContainer& known = containers_[at->second];
  if (known.kind == "list" || container.kind == "list") {
    known.count = std::max(known.count, container.count);
    return;
  }
  // Each key is looked at once: of as many files as a model has.
  std::unordered_set<std::string>& keys = keys_[at->second];
  if (keys.empty()) {
    keys.insert(known.keys.begin(), known.keys.end());
    steps_ += known.keys.size();
  }
  for (const std::string& key : container.keys) {
    if (keys.insert(key).second) known.keys.push_back(key);
  }
  steps_ += container.keys.size();
}

Status TorchLeavesAdder::Add(uint32_t number, const std::string& file_name,
                             const TorchLeaves& found) {
  Budget left = found.left;
  for (size_t i = 0; i < found.leaves.size(); ++i) {
    const TorchLeaf& leaf = found.leaves[i];
    if (catalog_->Find(leaf.name) >= 0) {
      return Conflict("is in " + file_name + " and in another file")
          .WithTensor(leaf.name);
    }
    TC_ASSIGN_OR_RETURN(
        const uint32_t entry,
        leaf.is_tensor
            ? AddTensor(number, leaf, &left)
            : catalog_->AddObject(leaf.name, number,
                                  ArchivedObject{found.range, i + 1}));
    catalog_->SetPath(entry, leaf.path);
    files_.emplace(leaf.name, number);
    if (leaf.unread) unread_[leaf.name] = *leaf.unread;
  }
  for (const StateContainer& each : found.containers) AddContainer(each);
  return {};
}

std::set<std::string, std::less<>> TorchLeavesAdder::Names() const {
  std::set<std::string, std::less<>> names;
  for (const auto& [name, file] : files_) names.insert(names.end(), name);
  return names;
}

Status TorchLeavesAdder::Finish(ForeignCatalog* out) {
  // Entries that are of no state dict stand at its root.
  const auto root = by_path_.find(std::string(kRootPath));
  for (uint32_t i = 0; root != by_path_.end() && i < catalog_->size(); ++i) {
    const std::string& name = catalog_->entry(i).name;
    if (files_.contains(name)) continue;
    AppendJsonString(&containers_[root->second].keys.emplace_back(), name);
  }
  const std::string structure = StructureJson(containers_);
  if (!structure.empty() && !out->files.empty()) {
    const std::string name(kStructureName);
    TC_RETURN_IF_ERROR(catalog_->AddObject(name, 0, ArchivedObject{}).status());
    out->made_objects[name] = structure;
  }
  out->unread.merge(unread_);
  out->storages = std::move(storages_);
  SortRanges(&out->storages);
  TC_ASSIGN_OR_RETURN(out->catalog,
                      Catalog::From(std::move(*catalog_), out->files));
  return {};
}

}  // namespace torch_ckpt
