// What CRCs are tested with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace torch_ckpt {

inline std::vector<unsigned char> CrcInput(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(n);
  for (auto& b : bytes) b = static_cast<unsigned char>(random());
  return bytes;
}

// From the definition, one bit at a time; the polynomial is bit-reversed. Goes
// on from `crc`, as Crc32 and Crc32c do.
inline uint32_t BitwiseCrc(uint32_t polynomial, uint32_t crc,
                           const unsigned char* p, size_t n) {
  crc = ~crc;
  for (size_t i = 0; i < n; ++i) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0u);
    }
  }
  return ~crc;
}

}  // namespace torch_ckpt
