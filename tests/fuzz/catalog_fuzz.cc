// The catalog file. The input is what stands behind the magic, version first,
// and before the checksum.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "format/ours/catalog.h"
#include "runtime/crc32c.h"

using namespace torch_ckpt;

namespace {

// Reads all of it; what is taken can be read once more as what it was made
// into, and that has one spelling.
void Read(std::string bytes) {
  const std::vector<ManifestFile> files = {
      {"a", "", FileRole::kData, uint64_t{1} << 40, {}},
      {"b", "", FileRole::kData, 100, {}},
      {"o", "", FileRole::kObjects, 100, {}}};
  const auto catalog = Catalog::Parse(std::move(bytes), files);
  if (!catalog.ok()) return;
  bool whole = true;
  for (uint32_t e = 0; e < catalog->entries().size(); ++e) {
    whole = whole && catalog->Placements(e, files).ok();
  }
  if (!whole) return;
  const auto again = catalog->Renamed({}, files);
  if (!again.ok() || again->entries().size() != catalog->entries().size())
    abort();
  const auto third = again->Renamed({}, files);
  if (!third.ok() || third->bytes() != again->bytes()) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes = "TCKPTCAT";
  bytes.append(reinterpret_cast<const char*>(data), size);
  const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
  char raw[sizeof crc];
  std::memcpy(raw, &crc, sizeof raw);
  bytes.append(raw, sizeof raw);
  Read(std::move(bytes));
  // And as it is, for the part before the checksum.
  Read(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
