// The short form of a header. The input is what stands between the version and
// the checksum; what is accepted has one spelling only.
#include <cstdlib>
#include <string>

#include "format/binary.h"
#include "format/safetensors/short_header.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes = "TCKPTHDR\x02";
  bytes.append(reinterpret_cast<const char*>(data), size);
  PutCrc(&bytes);
  const auto decoded = DecodeShortHeader(AsBytes(bytes));
  if (decoded.ok() &&
      EncodeShortHeader(decoded->file, decoded->text_crc32c) != bytes) {
    abort();
  }
  // And as it is, for the part before the checksum.
  (void)DecodeShortHeader({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
