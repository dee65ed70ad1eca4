// The leaves of state dicts in archives of torch.save, as entries of a catalog.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "base/budget.h"
#include "engine/open/catalog_reader.h"
#include "format/ours/catalog.h"
#include "format/ours/catalog_builder.h"
#include "format/torch/state.h"
#include "os/file.h"

namespace torch_ckpt {

struct TorchLeaf {
  std::string name, path;  // as of StateLeaf
  bool is_tensor = false;
  // Of tensors; `file` is not set. What a rank had of a DTensor may be one box
  // of the whole, several or none.
  Dtype dtype = Dtype::kU8;
  Dims shape;
  std::vector<Placement> placements;
  DigestedRange storage;               // that these are in
  std::optional<UnreadTensor> unread;  // of no tensor that is read
};

struct TorchLeaves {
  ByteRange range;                // of the archive
  std::vector<TorchLeaf> leaves;  // in the order of FlattenState
  std::vector<StateContainer> containers;
  Budget left{"the pickle", 0};  // for who keeps more of them
};

// Those of the archive at `range` of a file, which holds a state dict. What
// can be no placement becomes an object, which says why when it is read; where
// it is a tensor all the same, or hides one that would be lost with it,
// TorchLeaf::unread says so.
// `listed`: whether it may be the only item of a list. kCorrupt names the
// tensor; kUnsupported for what holds no state dict, and as TorchArchive::Open.
Result<TorchLeaves> FindTorchLeaves(const File& file, ByteRange range,
                                    bool listed);

// Adds them to a catalog, those of one archive after the other. For one thread.
class TorchLeavesAdder {
 public:
  // `catalog` outlives it, and may hold other entries.
  explicit TorchLeavesAdder(CatalogBuilder* catalog) : catalog_(catalog) {}

  // Those that the file `number` has. kConflict where a name is taken; it names
  // `file_name`. kExhausted where tied ones say too long a name too often.
  Status Add(uint32_t number, const std::string& file_name,
             const TorchLeaves& found);
  // Of all that were added.
  std::set<std::string, std::less<>> Names() const;
  // Whether some file had it.
  bool Has(const std::string& name) const { return files_.contains(name); }
  // Keys that uniting the containers of several archives has looked at.
  uint64_t steps() const { return steps_; }
  // Adds the structure, where names do not say all of it, and makes what
  // the builder holds the catalog of `out`, whose files are known.
  Status Finish(ForeignCatalog* out);

 private:
  // The same bytes in the same way: tied tensors are stored once.
  using Place = std::tuple<uint32_t, Dtype, std::vector<int64_t>>;

  static Place PlaceOf(uint32_t number, const TorchLeaf& leaf);
  Result<uint32_t> AddTensor(uint32_t number, const TorchLeaf& leaf,
                             Budget* left);
  void AddContainer(const StateContainer& container);

  CatalogBuilder* catalog_;
  std::map<std::string, uint32_t> files_;  // by leaf, that it is in
  std::map<Place, std::string> places_;
  std::vector<StateContainer> containers_;
  std::vector<std::unordered_set<std::string>> keys_;  // of these, once united
  std::map<std::string, size_t> by_path_;
  uint64_t steps_ = 0;
  std::vector<DigestedRange> storages_;
  std::map<std::string, UnreadTensor, std::less<>> unread_;
};

}  // namespace torch_ckpt
