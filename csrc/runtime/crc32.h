// CRC-32 (IEEE 802.3), which zip archives have of their entries, with the CPU's
// carry-less multiplication or instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace torch_ckpt {

// The CRC of the bytes that gave `crc` followed by these; start with 0.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);
// The CRC of A||B from those of A and B; B is `b_bytes` long.
uint32_t Crc32Combine(uint32_t a, uint32_t b, uint64_t b_bytes);

// The name of what Crc32 uses.
const char* Crc32Implementation();
// For tests: by the named implementation ("portable", "pclmulqdq",
// "vpclmulqdq", "armv8-crc"); nullopt where this CPU or build does not have it.
std::optional<uint32_t> Crc32By(std::string_view implementation, uint32_t crc,
                                const void* data, size_t bytes);

}  // namespace torch_ckpt
