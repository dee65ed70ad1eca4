// CRCs of 32 bits as polynomials over GF(2), for any generator P.
//
// A register holds a polynomial bit-reversed: bit 31 is x^0. Appending n bits
// multiplies by x^n modulo P, which is linear; so streams that were run apart
// are joined by shifting the earlier ones over the bytes of the later ones, and
// the usual inversion before and after cancels out of every combination.
//
// Templates are of P, so that what is computed from it is a constant. All but
// Combine work on the register, not inverted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torch_ckpt::crc {

inline constexpr uint32_t kIeee = 0xedb88320, kCastagnoli = 0x82f63b78;

inline constexpr uint32_t kOne = uint32_t{1} << 31;  // x^0
inline constexpr uint32_t kX = kOne >> 1;
inline constexpr uint32_t kX8 = kOne >> 8;

template <uint32_t kP>
constexpr uint32_t TimesX(uint32_t a) {
  return (a >> 1) ^ ((a & 1) != 0 ? kP : 0);
}

// a * b mod P.
template <uint32_t kP>
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = TimesX<kP>(b);
  }
  return product;
}

// base^n mod P by repeated squaring.
template <uint32_t kP>
constexpr uint32_t Power(uint32_t base, uint64_t n) {
  uint32_t result = kOne;
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) result = Multiply<kP>(result, base);
    base = Multiply<kP>(base, base);
  }
  return result;
}

// x^8 to the power of 1, 2, 4, ...: what `n` bytes more multiply a CRC by is
// the product of those that the bits of n name.
template <uint32_t kP>
inline constexpr auto kPowersOfX8 = [] {
  std::array<uint32_t, 64> powers{};
  uint32_t power = kX8;
  for (uint32_t& entry : powers) {
    entry = power;
    power = Multiply<kP>(power, power);
  }
  return powers;
}();

// The CRC of A||B from those of A and B; B is `b_bytes` long.
template <uint32_t kP>
uint32_t Combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
  for (size_t i = 0; b_bytes != 0; ++i, b_bytes >>= 1) {
    if ((b_bytes & 1) != 0) a = Multiply<kP>(kPowersOfX8<kP>[i], a);
  }
  return a ^ b;
}

// Goes on from a register over n bytes.
using Update = uint32_t (*)(uint32_t, const unsigned char*, size_t);

inline uint64_t Load64(const unsigned char* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline constexpr size_t kSliceBytes = 16;  // a step

// kSlices[k][b]: byte b followed by k zero bytes (Kounavis and Berry,
// "slicing-by-8").
template <uint32_t kP>
inline constexpr auto kSlices = [] {
  std::array<std::array<uint32_t, 256>, kSliceBytes> t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int i = 0; i < 8; ++i) c = TimesX<kP>(c);
    t[0][b] = c;
  }
  for (size_t k = 1; k < kSliceBytes; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
    }
  }
  return t;
}();

// On any CPU.
template <uint32_t kP>
uint32_t UpdatePortable(uint32_t crc, const unsigned char* p, size_t n) {
  constexpr const auto& kTable = kSlices<kP>;
  for (; n >= kSliceBytes; p += kSliceBytes, n -= kSliceBytes) {
    const uint64_t early = Load64(p) ^ crc, late = Load64(p + 8);
    crc = 0;
    for (size_t k = 0; k < 8; ++k) {
      crc ^= kTable[15 - k][(early >> (8 * k)) & 0xff] ^
             kTable[7 - k][(late >> (8 * k)) & 0xff];
    }
  }
  for (; n != 0; ++p, --n) crc = (crc >> 8) ^ kTable[0][(crc ^ *p) & 0xff];
  return crc;
}

}  // namespace torch_ckpt::crc
