// The safetensors header, as the reader sees it: length field, then JSON, then
// data up to a length that the input chooses. What is accepted must tile its
// data, and what our writer makes of it must be read back the same.
#include <cstdlib>

#include "format/safetensors/safetensors.h"
#include "format/safetensors/sharding_info.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  if (size < 2) return 0;
  (void)PeekFileId(bytes);
  (void)ParseHeaderLength(bytes.first(size < 8 ? size : 8), size);
  // Two bytes for the size of the data, the rest is the header: so the fuzzer
  // need not find a length field that fits.
  const uint64_t data_bytes = data[0] | uint64_t{data[1]} << 8;
  const ByteSpan header = bytes.subspan(2);
  const auto parsed =
      ParseSafetensorsHeader(header, 8 + header.size() + data_bytes);
  if (!parsed.ok()) return 0;
  uint64_t end = 0;
  for (const SafetensorsEntry& t : parsed->tensors) {
    if (t.begin != end || t.end < t.begin) abort();
    end = t.end;
  }
  if (end != data_bytes) abort();
  const auto built = BuildSafetensorsHeader(parsed->metadata, parsed->tensors);
  if (!built.ok()) abort();
  const auto again = ParseSafetensorsHeader(AsBytes(*built).subspan(8),
                                            built->size() + data_bytes);
  if (!again.ok() || again->tensors.size() != parsed->tensors.size() ||
      again->metadata != parsed->metadata)
    abort();
  (void)ParseShardingInfo(*parsed);
  return 0;
}
