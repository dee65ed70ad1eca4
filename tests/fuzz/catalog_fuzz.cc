// The catalog file. The input is what stands between the version and the
// checksum; what is accepted has one spelling only.
#include <cstdlib>
#include <cstring>
#include <string>

#include "format/catalog.h"
#include "runtime/crc32c.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes = "TCKPTCAT\x01";
  bytes.append(reinterpret_cast<const char*>(data), size);
  const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
  char raw[sizeof crc];
  std::memcpy(raw, &crc, sizeof raw);
  bytes.append(raw, sizeof raw);
  const auto catalog = DecodeCatalog(AsBytes(bytes));
  if (catalog.ok() && EncodeCatalog(*catalog) != bytes) abort();
  // And as it is, for the part before the checksum.
  (void)DecodeCatalog({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
