// Zip archives: every entry that is found lies inside.
#include <algorithm>
#include <cstdlib>

#include "format/torch/zip.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes{reinterpret_cast<const std::byte*>(data), size};
  const auto directory = FindZipDirectory(
      bytes.last(std::min(size, kZipTail + kMaxZipComment)), size);
  if (!directory.ok()) return 0;
  if (directory->begin + directory->bytes > size) abort();
  const auto entries = ParseZipDirectory(
      bytes.subspan(directory->begin, directory->bytes), *directory);
  if (!entries.ok()) return 0;
  for (const ZipEntry& entry : *entries) {
    const ByteSpan header = bytes.subspan(entry.header);
    const auto begin =
        ZipContentBegin(header.first(std::min(header.size(), kZipLocalHeader)),
                        entry, *directory);
    if (begin.ok() && *begin + entry.bytes > directory->begin) abort();
  }
  return 0;
}
