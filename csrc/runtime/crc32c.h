// CRC-32C (Castagnoli), with the CPU's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace torch_ckpt {

// Bytes that were just read or gathered are still in a core's second cache when
// they are digested in steps of this: both cost one pass over memory.
inline constexpr size_t kDigestStep = size_t{512} << 10;

// The CRC of the bytes that gave `crc` followed by these; start with 0.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes);
// The CRC of A||B from those of A and B; B is `b_bytes` long.
uint32_t Crc32cCombine(uint32_t a, uint32_t b, uint64_t b_bytes);

// Copies the bytes of `from` to `to` and digests what it has copied, whatever
// becomes of `from` meanwhile: one pass over memory where copying and then
// digesting are two. Where the CPU can, large copies go past its caches: they
// spare the memory the reading of what is overwritten, and the trainer its
// cache. Visible to other threads when it returns. The ranges must not overlap.
uint32_t Crc32cCopy(uint32_t crc, void* to, const void* from, size_t bytes);
// The same without a digest.
void StreamCopy(void* to, const void* from, size_t bytes);

// The name of what Crc32c uses.
const char* Crc32cImplementation();
// For tests: by the named implementation ("portable", "sse4.2", "vpclmulqdq",
// "armv8-crc"); nullopt where this CPU or build does not have it.
std::optional<uint32_t> Crc32cBy(std::string_view implementation, uint32_t crc,
                                 const void* data, size_t bytes);
std::optional<uint32_t> Crc32cCopyBy(std::string_view implementation,
                                     uint32_t crc, void* to, const void* from,
                                     size_t bytes);

}  // namespace torch_ckpt
