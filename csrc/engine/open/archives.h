// Archives of torch.save in files, for callers that know nothing of pickles:
// what they hold, and where.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/byte_range.h"
#include "engine/open/stored_view.h"
#include "format/ours/catalog.h"
#include "os/file.h"

namespace torch_ckpt {

// An entry of an archive: where its bytes are in the file, and their CRC-32.
struct ZipContent {
  std::string name;
  ByteRange range;
  uint32_t crc32 = 0;              // 0: the writer did not say
  std::vector<uint64_t> crc32_at;  // where in the file that stands

  bool operator==(const ZipContent&) const = default;
};

// Whether one begins there, by its first bytes.
Result<bool> IsTorchArchive(const File& file, uint64_t offset);

// Those that follow open an archive, and have the errors of
// TorchArchive::Open.

// What all entries of the archive at `range` are, for who verifies them.
Result<std::vector<ZipContent>> ReadZipContents(const File& file,
                                                ByteRange range);

// Objects that the archive at `range` holds (ArchivedObject::leaf), as typed
// JSON (docs/format.md, section 7). Each may have an error of its own.
Result<std::vector<Result<std::string>>> ReadArchivedObjects(
    const File& file, ByteRange range, std::span<const uint64_t> leaves);

// `placement`, a kArchive of a tensor of `dtype`, as the kStridedBox that
// it is, and its storage. kCorrupt where the archive holds something else.
Result<StoredView::Resolved> ResolveArchive(const File& file,
                                            const Placement& placement,
                                            Dtype dtype);

}  // namespace torch_ckpt
