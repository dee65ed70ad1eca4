// Zip archives of stored entries, as torch.save writes them: where the bytes of
// each entry are. Zip64, entries with data descriptors; no compression, no
// encryption, no spanning of disks.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Offsets are from the first byte of the archive.
struct ZipDirectory {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t entries = 0;
};

struct ZipEntry {
  std::string_view name;  // of the bytes that were parsed
  uint64_t header = 0;    // of its local header
  uint64_t bytes = 0;     // of its content
  uint32_t crc32 = 0;     // 0 where the writer left it out
  uint64_t crc32_at = 0;  // where in the archive that stands
  // Whether it stands behind the content too, kZipCrcBehind bytes from its end.
  bool described = false;
};

inline constexpr uint64_t kZipCrcBehind = 4;

inline constexpr size_t kZipLocalHeader = 30;  // bytes, without name and extra
// What FindZipDirectory wants to see of the end of an archive without a
// comment, and what more of one with it.
inline constexpr size_t kZipTail = 22 + 20 + 56;
inline constexpr size_t kMaxZipComment = 0xffff;

// Whether the last bytes of `tail` are the end of an archive that has no
// comment, as torch.save writes none.
bool EndsWithoutComment(ByteSpan tail);

// `tail` is the end of an archive of `archive_bytes`. kCorrupt where it is none
// or cut short, kUnsupported where it spans disks.
Result<ZipDirectory> FindZipDirectory(ByteSpan tail, uint64_t archive_bytes);

// The entries, of the bytes of `directory`. All lie before its begin, and
// apart. kUnsupported for compressed and encrypted ones.
Result<std::vector<ZipEntry>> ParseZipDirectory(ByteSpan bytes,
                                                const ZipDirectory& directory);

// Where the content of `entry` begins: `header` are kZipLocalHeader bytes from
// entry.header on. kCorrupt where it is not its header, or where the content
// would reach into the directory.
Result<uint64_t> ZipContentBegin(ByteSpan header, const ZipEntry& entry,
                                 const ZipDirectory& directory);

}  // namespace torch_ckpt
