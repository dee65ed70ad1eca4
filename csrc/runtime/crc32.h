// CRC-32 (IEEE 802.3), which zip archives have of their entries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_ckpt {

// The CRC of the bytes that gave `crc` followed by these; start with 0.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);

}  // namespace torch_ckpt
