// Catalog: the content of a checkpoint, whichever format it came from.
//
// A tensor has a name, dtype and global shape; its placements say where the
// bytes of its boxes are. A catalog stays as it is encoded (docs/format.md,
// section 6): a checkpoint of thousands of ranks has millions of placements, of
// which one rank needs few. Names, dtypes and shapes are decoded when it is
// parsed, the placements of an entry when they are asked for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/budget.h"
#include "base/byte_range.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/dtype.h"
#include "format/ours/manifest.h"

namespace torch_ckpt {

class CatalogBuilder;

enum class EntryKind : uint8_t { kTensor = 0, kAlias = 1, kObject = 2 };

// Two owners of one element are an error; replicas may repeat an owner's box.
enum class PlacementRole : uint8_t { kOwner = 0, kReplica = 1 };

enum class PlacementKind : uint8_t {
  kBox,         // row-major bytes of a box
  kStridedBox,  // a box with a stride for each dimension
  kRange,       // elements of the tensor in its row-major order
  // A torch.save archive whose tensor is the box. Where in it the bytes are,
  // and with which strides, only the archive says: Checkpoint::Resolve
  // looks.
  kArchive,
};

struct Placement {
  uint32_t file = 0;  // position in the checkpoint's files
  PlacementRole role = PlacementRole::kOwner;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  Box box;              // none of a kRange
  PlacementKind kind = PlacementKind::kBox;
  // kStridedBox: bytes from one unit (format/dtype.h) to the next in each
  // dimension; not negative.
  Dims strides;
  int64_t begin = 0, end = 0;  // kRange
  uint64_t bytes = 0;          // kArchive: of the archive

  bool operator==(const Placement&) const = default;
};

// Bytes of a file whose CRC-32 is known, as an archive says it of its entries.
struct DigestedRange {
  uint32_t file = 0;
  ByteRange range;
  uint32_t crc32 = 0;

  bool operator==(const DigestedRange&) const = default;
};
// By file and offset, each once.
void SortRanges(std::vector<DigestedRange>* ranges);

// An archive of torch.save.
struct TorchArchivePlace {
  uint32_t file = 0;
  ByteRange range;
};

// An object inside of a torch.save archive.
struct ArchivedObject {
  ByteRange archive;
  // 0: what the archive holds; n: the n-th leaf of the state dict that it is
  // (format/torch/state.h).
  uint64_t leaf = 0;
};

// A tensor whose elements nobody here can make of what files have of it.
struct UnreadTensor {
  std::string dtype;  // of safetensors, else as torch calls it; "?": not said
  std::optional<Dims> shape;  // nullopt: not said
  std::string reason;         // "is a sparse tensor"
};

// The views are of the catalog and live as long as any copy of it.
struct CatalogEntry {
  std::string_view name;
  EntryKind kind = EntryKind::kTensor;
  Dtype dtype = Dtype::kU8;   // of tensors and aliases
  Dims shape;                 // of tensors and aliases
  std::string_view alias_of;  // kAlias: the tensor whose bytes it has
  uint32_t file = 0;          // kObject: position of the file that holds it
  std::optional<ArchivedObject> archived;  // kObject: not of a file of objects
  // The state-dict path as JSON text, e.g. ["model","layers",0]; empty when
  // the path is just (name,). Source of DCP's planner_data.
  std::string_view path;
};

// Immutable; const access is thread-safe, and copies share their bytes.
class Catalog {
 public:
  Catalog() = default;
  // Reads a catalog file. `files` are those that it was made
  // for, in their order. kCorrupt or kUnsupported: arbitrary bytes give an
  // error, bounded memory, never a crash. Placements are not looked at.
  // kExhausted where aliases repeat more of them than so many bytes account
  // for.
  static Result<Catalog> Parse(std::string bytes,
                               std::span<const ManifestFile> files);

  // What was built, as it is read from its file. Its memory is freed first.
  static Result<Catalog> From(CatalogBuilder built,
                              std::span<const ManifestFile> files);

  // Ascending by name, compared as bytes.
  const std::vector<CatalogEntry>& entries() const { return entries_; }
  // The position of an entry; -1 when there is none.
  int64_t Find(std::string_view name) const;
  // Decodes the placements of an entry, or of what it is an alias of, and
  // checks each by itself: inside its tensor, inside one of `files`, of whole
  // bytes. Whether the owners tile the tensor is not seen here
  // (engine/open/checkpoint.h). An object has none. kCorrupt for more replicas
  // of each owner than there are files, kExhausted for more placements than a
  // Budget of their bytes keeps.
  Result<std::vector<Placement>> Placements(
      uint32_t entry, std::span<const ManifestFile> files) const;

  // The tensor that an alias is of; else the entry itself.
  uint32_t TensorOf(uint32_t entry) const { return slices_[entry].tensor; }

  // The same without the entries of these names. The first alias of a tensor
  // that goes takes its place.
  Result<Catalog> Without(const std::set<std::string, std::less<>>& names,
                          std::span<const ManifestFile> files) const;
  // Adds those that are left then to `builder`. kCorrupt where a name is taken.
  Status CopyTo(CatalogBuilder* builder,
                const std::set<std::string, std::less<>>& without,
                std::span<const ManifestFile> files) const;
  // The same under other names, and paths of just them; names that are not
  // there do not matter. kInvalidArgument where two would have one name.
  Result<Catalog> Renamed(const std::map<std::string, std::string>& new_names,
                          std::span<const ManifestFile> files) const;

  // The entries that lie in those of `files` which `kept` numbers, for these
  // alone: `left`, in that order. kCorrupt for one that lies in others too.
  Result<Catalog> InFiles(std::span<const uint32_t> kept,
                          std::span<const ManifestFile> files,
                          std::span<const ManifestFile> left) const;

  // As it is stored.
  std::string_view bytes() const {
    return bytes_ ? std::string_view(*bytes_) : std::string_view();
  }

 private:
  // Where the placements of an entry are; those of an alias, its tensor's.
  struct Slice {
    size_t begin = 0, end = 0;  // in bytes_
    size_t count = 0;
    uint32_t tensor = 0;  // whose they are
  };
  Status ParseEntry(size_t begin, size_t end,
                    std::span<const ManifestFile> files);
  Status LinkAliases(Budget* budget);

  std::shared_ptr<const std::string> bytes_;
  std::vector<CatalogEntry> entries_;
  std::vector<Slice> slices_;  // by entry
};

inline constexpr uint64_t kMaxCatalogBytes = uint64_t{1} << 30;

}  // namespace torch_ckpt
