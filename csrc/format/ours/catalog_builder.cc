#include "format/ours/catalog_builder.h"

#include <algorithm>
#include <utility>

#include "format/ours/catalog_codec.h"

namespace torch_ckpt {

using internal::EntryField;
using internal::PutPlacement;

Result<uint32_t> CatalogBuilder::Add(Entry entry) {
  const uint32_t number = size();
  if (by_name_.Insert(entry.name, number, NameAt()) != number) {
    return Corrupt("the name stands twice in the catalog")
        .WithTensor(std::move(entry.name));
  }
  entries_.push_back(std::move(entry));
  return number;
}

Result<uint32_t> CatalogBuilder::AddTensor(std::string name, Dtype dtype,
                                           const Dims& shape) {
  Entry entry;
  entry.name = std::move(name);
  entry.dtype = dtype;
  entry.shape = shape;
  return Add(std::move(entry));
}

Result<uint32_t> CatalogBuilder::AddAlias(std::string name,
                                          std::string alias_of) {
  Entry entry;
  entry.name = std::move(name);
  entry.kind = EntryKind::kAlias;
  entry.alias_of = std::move(alias_of);
  return Add(std::move(entry));
}

Result<uint32_t> CatalogBuilder::AddObject(
    std::string name, uint32_t file, std::optional<ArchivedObject> archived) {
  Entry entry;
  entry.name = std::move(name);
  entry.kind = EntryKind::kObject;
  entry.file = file;
  entry.archived = archived;
  return Add(std::move(entry));
}

uint32_t CatalogBuilder::FindOrAddTensor(std::string_view name) {
  const uint32_t number = by_name_.Insert(name, size(), NameAt());
  if (number == size()) {
    // Not emplace_back, a weak symbol that passes for one of ours.
    entries_.resize(number + size_t{1});
    entries_.back().name = name;
  }
  return number;
}

void CatalogBuilder::SetType(uint32_t entry, Dtype dtype, const Dims& shape) {
  entries_[entry].dtype = dtype;
  entries_[entry].shape = shape;
}

void CatalogBuilder::SetPath(uint32_t entry, std::string path) {
  entries_[entry].path = std::move(path);
}

Status CatalogBuilder::AddPlacement(uint32_t entry,
                                    const Placement& placement) {
  Entry& e = entries_[entry];
  if (placement.kind != PlacementKind::kRange &&
      !Inside(placement.box, e.shape)) {
    return Corrupt("box " + placement.box.ToString() + " is not inside shape " +
                   e.shape.ToString())
        .WithTensor(e.name);
  }
  PutPlacement(&e.placements, placement, e.shape);
  ++e.placement_count;
  return {};
}

Result<std::vector<Placement>> CatalogBuilder::Placements(
    uint32_t entry) const {
  const Entry& e = entries_[entry];
  BinaryReader in(AsBytes(e.placements));
  std::vector<Placement> placements;
  placements.reserve(e.placement_count);
  for (size_t i = 0; i < e.placement_count; ++i) {
    Result<Placement> placement = internal::GetPlacement(&in, e.dtype, e.shape);
    if (!placement.ok()) return Status(placement.status()).WithTensor(e.name);
    placements.push_back(std::move(placement).value());
  }
  return placements;
}

void CatalogBuilder::SetPlacements(uint32_t entry,
                                   std::span<const Placement> placements) {
  Entry& e = entries_[entry];
  e.placements.clear();
  e.placement_count = placements.size();
  for (const Placement& placement : placements) {
    PutPlacement(&e.placements, placement, e.shape);
  }
}

int64_t CatalogBuilder::Find(std::string_view name) const {
  return by_name_.Find(name, NameAt());
}

Result<std::string> CatalogBuilder::Encode() const {
  // With the names, so that to compare two is to follow no more than those.
  std::vector<std::pair<std::string_view, const Entry*>> order;
  order.reserve(entries_.size());
  for (const Entry& entry : entries_) order.emplace_back(entry.name, &entry);
  // Most often runs that ascend, the files', on which std::sort is slow.
  std::stable_sort(order.begin(), order.end());
  std::string out(internal::kCatalogMagic);
  out += internal::kCatalogVersion;
  const auto put_u32 = [&out](size_t at, uint64_t value) {
    const auto word = static_cast<uint32_t>(value);
    std::memcpy(out.data() + at, &word, sizeof word);
  };
  const size_t index = internal::kCatalogHead;
  const size_t begin = index + order.size() * sizeof(uint32_t);
  out.resize(begin);
  put_u32(internal::kCatalogMagic.size() + 1, order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const Entry& e = *order[i].second;
    put_u32(index + i * sizeof(uint32_t), out.size() - begin);
    PutVarint(&out, static_cast<uint64_t>(e.kind));
    PutString(&out, e.name);
    if (!e.path.empty()) {
      PutVarint(&out, static_cast<uint64_t>(EntryField::kPath) << 1);
      PutString(&out, e.path);
    }
    if (e.archived) {
      std::string range;
      PutVarint(&range, e.archived->archive.begin);
      PutVarint(&range, e.archived->archive.size());
      if (e.archived->leaf > 0) PutVarint(&range, e.archived->leaf);
      PutVarint(&out, static_cast<uint64_t>(EntryField::kArchive) << 1 |
                          internal::kCriticalBit);
      PutString(&out, range);
    }
    PutVarint(&out, 0);
    switch (e.kind) {
      case EntryKind::kAlias:
        PutString(&out, e.alias_of);
        break;
      case EntryKind::kObject:
        PutVarint(&out, e.file);
        break;
      case EntryKind::kTensor:
        PutVarint(&out, static_cast<uint64_t>(e.dtype));
        PutVarint(&out, static_cast<uint64_t>(e.shape.size()));
        PutDims(&out, e.shape);
        PutVarint(&out, e.placement_count);
        out += e.placements;
        break;
    }
    // Before positions are cut to 32 bits.
    if (out.size() > kMaxCatalogBytes) break;
  }
  PutCrc(&out);
  if (out.size() > kMaxCatalogBytes) {
    return Unsupported(
        "the catalog would be larger than 1 GiB: fewer boxes a tensor or fewer "
        "tensors are needed");
  }
  return out;
}

}  // namespace torch_ckpt
