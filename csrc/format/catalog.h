// Catalog: the content of a checkpoint, whichever format it came from.
//
// A tensor has a name, dtype and global shape; its placements say where the
// bytes of its boxes are. Within a placement bytes are in row-major order of
// the box at `offset` of the file (that is what files hold; placements in
// memory carry their own strides, see plan/runs.h).
//
// A Catalog is built once and then immutable; const access is thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/dtype.h"
#include "format/name_index.h"

namespace torch_ckpt {

enum class EntryKind : uint8_t { kTensor = 0, kAlias = 1, kObject = 2 };

// Two owners of one element are an error; replicas may repeat an owner's box.
enum class PlacementRole : uint8_t { kOwner = 0, kReplica = 1 };

// What an element without a placement holds. kNone: it is an error.
enum class FillPolicy : uint8_t { kNone = 0 };

struct CatalogFile {
  std::string name;  // basename in the checkpoint directory
  std::string id;    // 32 hex digits; empty in directories that are not ours
  uint64_t bytes = 0;
};

struct Placement {
  uint32_t file = 0;  // index into Catalog::files()
  PlacementRole role = PlacementRole::kOwner;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  Box box;
};

struct CatalogEntry {
  std::string name;
  EntryKind kind = EntryKind::kTensor;
  Dtype storage_dtype = Dtype::kU8;  // of the bytes on disk
  Dtype logical_dtype = Dtype::kU8;  // what they mean; differs after a cast
  FillPolicy fill = FillPolicy::kNone;
  Dims shape;
  std::string alias_of;  // kAlias only
  // The state-dict path as JSON text, e.g. ["model","layers",0]; empty when
  // the path is just (name,). Source of DCP's planner_data.
  std::string path;
};

class Catalog {
 public:
  // Building. Ids are positions. AddEntry refuses a second entry of one name.
  uint32_t AddFile(CatalogFile file);
  Result<uint32_t> AddEntry(CatalogEntry entry);
  // REQUIRES: the entry exists.
  void SetPath(uint32_t entry, std::string path) {
    entries_[entry].path = std::move(path);
  }
  // Room for as many as will be added.
  void ReserveEntries(size_t count) {
    entries_.reserve(count);
    slices_.reserve(count);
    placements_.reserve(count);
  }
  // Gives every alias the placements of the tensor that it names. kCorrupt
  // where that is no tensor of its dtype and shape. To be called when all are
  // added.
  Status LinkAliases();
  // The same under other names, and paths of just them; names that are not
  // there do not matter. kInvalidArgument where two would have one name.
  Result<Catalog> Renamed(
      const std::map<std::string, std::string>& new_names) const;
  // Checks that box is Inside shape. REQUIRES: entry and placement.file exist;
  // no other entry was given placements since this one's first.
  Status AddPlacement(uint32_t entry, const Placement& placement);

  const std::vector<CatalogFile>& files() const { return files_; }
  const std::vector<CatalogEntry>& entries() const { return entries_; }
  // -1 when there is none. An alias is found under its own name.
  int64_t Find(std::string_view name) const;
  std::span<const Placement> placements(uint32_t entry) const {
    return std::span(placements_)
        .subspan(slices_[entry].first, slices_[entry].count);
  }

 private:
  auto NameAt() const {
    return
        [this](uint32_t id) -> const std::string& { return entries_[id].name; };
  }

  std::vector<CatalogFile> files_;
  std::vector<CatalogEntry> entries_;
  // Those of all entries in one list: most have one.
  struct Slice {
    size_t first = 0, count = 0;
  };
  std::vector<Slice> slices_;  // by entry
  std::vector<Placement> placements_;
  NameIndex by_name_;
};

// The catalog file: "TCKPTCAT", version, LEB128 varints and length-prefixed
// strings, CRC-32C at the end (docs/format.md). Decoding checks everything:
// arbitrary bytes give an error, bounded memory, never a crash. Whether the
// owners of a tensor tile it is not seen here (engine/build_catalog.h).
inline constexpr uint64_t kMaxCatalogBytes = uint64_t{1} << 30;
std::string EncodeCatalog(const Catalog& catalog);
Result<Catalog> DecodeCatalog(ByteSpan bytes);

}  // namespace torch_ckpt
