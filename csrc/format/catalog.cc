#include "format/catalog.h"

namespace torch_ckpt {

uint32_t Catalog::AddFile(CatalogFile file) {
  files_.push_back(std::move(file));
  return static_cast<uint32_t>(files_.size() - 1);
}

Result<uint32_t> Catalog::AddEntry(CatalogEntry entry) {
  const auto id = static_cast<uint32_t>(entries_.size());
  if (by_name_.Insert(entry.name, id, NameAt()) != id) {
    return Corrupt("the name stands twice in the catalog")
        .WithTensor(std::move(entry.name));
  }
  entries_.push_back(std::move(entry));
  slices_.emplace_back();
  return id;
}

Status Catalog::AddPlacement(uint32_t entry, const Placement& placement) {
  const CatalogEntry& e = entries_[entry];
  if (!Inside(placement.box, e.shape)) {
    return Corrupt("box " + placement.box.ToString() + " is not inside shape " +
                   e.shape.ToString())
        .WithTensor(e.name);
  }
  Slice& slice = slices_[entry];
  if (slice.count == 0) slice.first = placements_.size();
  if (slice.first + slice.count != placements_.size()) {
    return Internal("its placements are not added one after another")
        .WithTensor(e.name);
  }
  placements_.push_back(placement);
  ++slice.count;
  return {};
}

int64_t Catalog::Find(std::string_view name) const {
  return by_name_.Find(name, NameAt());
}

Status Catalog::LinkAliases() {
  for (uint32_t id = 0; id < entries_.size(); ++id) {
    const CatalogEntry& entry = entries_[id];
    if (entry.kind != EntryKind::kAlias) continue;
    const int64_t target = Find(entry.alias_of);
    const CatalogEntry* of =
        target < 0 ? nullptr : &entries_[static_cast<size_t>(target)];
    if (!of || of->kind != EntryKind::kTensor ||
        of->storage_dtype != entry.storage_dtype ||
        of->logical_dtype != entry.logical_dtype ||
        !(of->shape == entry.shape)) {
      return Corrupt("is an alias of '" + entry.alias_of +
                     "', which is no tensor like it in the catalog")
          .WithTensor(entry.name);
    }
    slices_[id] = slices_[static_cast<size_t>(target)];
  }
  return {};
}

Result<Catalog> Catalog::Renamed(
    const std::map<std::string, std::string>& new_names) const {
  Catalog renamed;
  renamed.files_ = files_;
  renamed.slices_.reserve(entries_.size());
  renamed.entries_.reserve(entries_.size());
  for (CatalogEntry entry : entries_) {
    const auto found = new_names.find(entry.name);
    if (found != new_names.end()) {
      entry.name = found->second;
      entry.path.clear();
    }
    const auto of = new_names.find(entry.alias_of);
    if (of != new_names.end()) entry.alias_of = of->second;
    if (const auto id = renamed.AddEntry(std::move(entry)); !id.ok()) {
      return InvalidArgument("two tensors would have this name")
          .WithTensor(id.status().tensor());
    }
  }
  renamed.slices_ = slices_;
  renamed.placements_ = placements_;
  return renamed;
}

}  // namespace torch_ckpt
