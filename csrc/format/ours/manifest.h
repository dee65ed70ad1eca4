// torch_ckpt.json: the commit mark. Written last; readers use only what it
// names. The journal (commit.json) holds the manifest that is being committed
// plus what the replay must do.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

inline constexpr int kManifestVersion = 2;
inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

// Digests cover a file in segments: cut at every multiple of kSegmentBytes
// from the start of the file. CRC-32C values combine, so any writer boundary
// may be used while writing.
inline constexpr uint64_t kSegmentBytes = uint64_t{1} << 20;

enum class FileRole : uint8_t { kData, kObjects, kCatalog, kIndex, kExtra };
// "data", "objects", "catalog", "index", "extra".
std::string_view RoleName(FileRole role);
std::optional<FileRole> RoleFromName(std::string_view name);

// How a file holds its bytes. kSafetensors: the file's id stands in its header.
// kRaw: nothing but them.
enum class Container : uint8_t { kSafetensors, kRaw };
inline Container ContainerOf(FileRole role) {
  return role == FileRole::kData ? Container::kSafetensors : Container::kRaw;
}

struct ManifestFile {
  std::string name;  // may be a path below the directory (CheckFilePath)
  std::string id;    // 32 hex digits
  FileRole role = FileRole::kData;
  uint64_t bytes = 0;
  std::vector<uint32_t> crc32c;  // one per segment, ceil(bytes / segment)
  Container container = ContainerOf(role);
};

// kCorrupt, for the caller to name the file, unless `crc32c` is the digest of
// the segment that begins at `begin`.
Status CheckSegment(const ManifestFile& file, uint64_t begin, uint32_t crc32c);
// The same of all segments that `bytes` are, from `begin` on.
Status CheckSegments(const ManifestFile& file, uint64_t begin, ByteSpan bytes);

// Whose part a manifest describes, in a save without collectives. Parts with
// one run id, sequence and world size make one checkpoint.
struct ManifestPart {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::string run_id;     // 32 hex digits, the same on all ranks of a run
  uint64_t sequence = 0;  // which save of the run into this directory

  bool SameSave(const ManifestPart& other) const {
    return world_size == other.world_size && run_id == other.run_id &&
           sequence == other.sequence;
  }
};

struct Manifest {
  std::string save_id;
  int64_t world_size = 1;
  std::optional<ManifestPart> part;  // of one rank; absent when it is of all
  std::vector<ManifestFile> files;
  // What people say of the checkpoint: names, and JSON texts, which nobody here
  // looks into.
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Finds files by name. The list must outlive it and stay as it is.
class FilesByName {
 public:
  FilesByName() = default;
  explicit FilesByName(std::span<const ManifestFile> files);
  // Its position in the list; -1 where there is none.
  int64_t Find(std::string_view name) const;

 private:
  std::span<const ManifestFile> files_;
  std::vector<uint32_t> sorted_;  // positions, by name
};

// One rename of the replay: staging/<from> -> target/<to>.
struct JournalRename {
  std::string from, to;
};

// One whose manifest names no file removes the checkpoint that stands there:
// what `removes` names, and then the manifest.
struct Journal {
  bool IsRemoval() const { return manifest.files.empty(); }

  Manifest manifest;
  std::vector<JournalRename> renames;
  std::vector<std::string> removes;  // names in the target, of the old manifest
};

// docs/format.md has the layout. One file per line; the last line is the CRC of
// all text before it, so that any altered bit is seen. REQUIRES: what Parse
// checks; it is not checked here.
std::string EncodeManifest(const Manifest& manifest);
// Strict: versions, names (CheckFilePath), ids, segment counts, no duplicates,
// no unknown keys. A manifest of another version is kUnsupported. The manifest
// in a journal is never a part.
Result<Manifest> ParseManifest(ByteSpan text);
std::string EncodeJournal(const Journal& journal);
// As ParseManifest; besides, every rename leads to a file of the manifest, and
// nothing is removed that the manifest names.
Result<Journal> ParseJournal(ByteSpan text);

}  // namespace torch_ckpt
