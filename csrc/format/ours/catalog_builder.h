// A catalog while it is being made.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/name_index.h"
#include "format/ours/catalog.h"

namespace torch_ckpt {

// Takes entries in any order and encodes them by name. For one thread.
class CatalogBuilder {
 public:
  struct Entry {
    std::string name;
    EntryKind kind = EntryKind::kTensor;
    Dtype dtype = Dtype::kU8;                // tensors
    Dims shape;                              // tensors
    std::string alias_of;                    // aliases
    uint32_t file = 0;                       // objects
    std::optional<ArchivedObject> archived;  // objects
    std::string path;
    size_t placement_count = 0;
    std::string placements;  // encoded
  };

  // Each returns the number of the entry here. kCorrupt where the name is
  // taken.
  Result<uint32_t> AddTensor(std::string name, Dtype dtype, const Dims& shape);
  Result<uint32_t> AddAlias(std::string name, std::string alias_of);
  Result<uint32_t> AddObject(std::string name, uint32_t file,
                             std::optional<ArchivedObject> archived = {});
  // The tensor of this name, which is a new one where there was none; all but
  // the name is then to be set.
  uint32_t FindOrAddTensor(std::string_view name);
  // REQUIRES of all that follow: the entry exists, and is a tensor where
  // dtype, shape or placements are meant, which come in this order.
  void SetType(uint32_t entry, Dtype dtype, const Dims& shape);
  void SetPath(uint32_t entry, std::string path);
  // kCorrupt where it is not inside the tensor.
  Status AddPlacement(uint32_t entry, const Placement& placement);
  // In the order in which they were added. kCorrupt for one that cannot be
  // stored.
  Result<std::vector<Placement>> Placements(uint32_t entry) const;
  void SetPlacements(uint32_t entry, std::span<const Placement> placements);

  // Numbers are below size().
  const Entry& entry(uint32_t number) const { return entries_[number]; }
  uint32_t size() const { return static_cast<uint32_t>(entries_.size()); }
  // -1 when there is none.
  int64_t Find(std::string_view name) const;

  // The catalog file. kUnsupported above kMaxCatalogBytes. What Catalog::Parse
  // refuses is not looked for.
  Result<std::string> Encode() const;

 private:
  Result<uint32_t> Add(Entry entry);
  auto NameAt() const {
    return
        [this](uint32_t id) -> const std::string& { return entries_[id].name; };
  }

  // Not a vector, which has all of them twice while it grows.
  std::deque<Entry> entries_;
  NameIndex by_name_;
};

}  // namespace torch_ckpt
