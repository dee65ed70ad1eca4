#include "runtime/crc32.h"

#include <array>
#include <cstring>

namespace torch_ckpt {
namespace {

constexpr uint32_t kIeeePolynomial = 0xedb88320;  // reflected
constexpr size_t kBytesAtOnce = 16;               // bytes a step

// tables[k][b]: the CRC of byte b followed by k zeros (Kounavis and Berry,
// "slicing-by-8").
constexpr auto kIeeeTables = [] {
  std::array<std::array<uint32_t, 256>, kBytesAtOnce> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc & 1 ? crc >> 1 ^ kIeeePolynomial : crc >> 1;
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < kBytesAtOnce; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = crc >> 8 ^ tables[0][crc & 255];
    }
  }
  return tables;
}();

}  // namespace

uint32_t Crc32(uint32_t crc, const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= kBytesAtOnce; bytes -= kBytesAtOnce, at += kBytesAtOnce) {
    std::array<uint32_t, kBytesAtOnce / 4> words;
    std::memcpy(words.data(), at, kBytesAtOnce);
    words[0] ^= crc;
    crc = 0;
    for (size_t w = 0; w < words.size(); ++w) {
      for (size_t b = 0; b < 4; ++b) {
        crc ^=
            kIeeeTables[kBytesAtOnce - 1 - 4 * w - b][words[w] >> 8 * b & 255];
      }
    }
  }
  for (; bytes > 0; --bytes)
    crc = crc >> 8 ^ kIeeeTables[0][(crc ^ *at++) & 255];
  return ~crc;
}

}  // namespace torch_ckpt
