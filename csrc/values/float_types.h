// Elements of each float type to floats and back, so that loops of them can be
// vectorized. For the files of this room.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace torch_ckpt::float_types {

constexpr uint32_t kInfinity = 0x7f800000;  // the bits of a float

// Without a branch, which would keep loops from being vectorized.
constexpr uint32_t Select(bool which, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(which);
  return (yes & mask) | (no & ~mask);
}

// A float type of at most 16 bits: sign, exponent, `mantissa` bits.
// Without the sign, `largest` is the code of what is too large (infinity, or
// the largest number where there is none) and `nan` that of a NaN.
template <class Code, int mantissa, int bias, uint32_t largest, uint32_t nan>
struct Narrow {
  using Element = Code;
  static constexpr int kShift = 23 - mantissa;
  static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Code));
  // Its mantissa is 0 then.
  static constexpr bool kHasInfinity = (largest & ((1u << mantissa) - 1)) == 0;
  // Without the sign, the bits of the smallest float that is rounded to more
  // than the largest number. That one's neighbour above is half a step away; a
  // tie goes to the even code.
  static constexpr uint32_t kLargestNumber =
      kHasInfinity ? largest - 1 : largest;
  static constexpr uint32_t kTooLarge =
      (kLargestNumber << kShift) + (static_cast<uint32_t>(127 - bias) << 23) +
      (1u << (kShift - 1)) + (kLargestNumber % 2 == 0 ? 1 : 0);

  [[gnu::always_inline]] static Code FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal: other bias, rounded at the last bit that stays.
    const uint32_t biased =
        magnitude - (static_cast<uint32_t>(127 - bias) << 23);
    uint32_t code =
        (biased + ((1u << (kShift - 1)) - 1) + ((biased >> kShift) & 1)) >>
        kShift;
    code = std::min(code, largest);
    // Subnormal: added to a power of two whose last bit is the smallest value,
    // a float is rounded to a multiple of that.
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - bias)
                                         << 23;
    constexpr auto kMagic =
        static_cast<uint32_t>(127 + 1 - bias - mantissa + 23) << 23;
    const uint32_t small =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) +
                                std::bit_cast<float>(kMagic)) -
        kMagic;
    code = Select(magnitude < kSmallestNormal, small, code);
    code = Select(magnitude > kInfinity, nan, code);
    return static_cast<Code>(code | ((bits & 0x80000000u) >> kSignShift));
  }

  [[gnu::always_inline]] static float ToFloat(Code element) {
    const uint32_t bits = element;
    const uint32_t sign = bits << kSignShift & 0x80000000u;
    const uint32_t magnitude = bits & ((1u << (8 * sizeof(Code) - 1)) - 1);
    const uint32_t field = magnitude & ((1u << mantissa) - 1);
    constexpr uint32_t kSmallest =
        static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23;
    // Signed: CPUs have no instruction for the other.
    const float subnormal = static_cast<float>(static_cast<int32_t>(field)) *
                            std::bit_cast<float>(kSmallest);
    uint32_t out =
        (magnitude << kShift) + (static_cast<uint32_t>(127 - bias) << 23);
    out = Select(magnitude < 1u << mantissa, std::bit_cast<uint32_t>(subnormal),
                 out);
    if (kHasInfinity) out = Select(magnitude == largest, kInfinity, out);
    out = Select(magnitude > largest, 0x7fc00000u, out);
    return std::bit_cast<float>(out | sign);
  }
};

using Half = Narrow<uint16_t, 10, 15, 0x7c00, 0x7e00>;
using E5M2 = Narrow<uint8_t, 2, 15, 0x7c, 0x7f>;
using E4M3 = Narrow<uint8_t, 3, 7, 0x7e, 0x7f>;

// Two in a byte, the first in its low half. A code stands by itself in a byte
// here.
struct E2M1 {
  static float ToFloat(uint8_t code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t normal = (magnitude << 22) + (uint32_t{126} << 23);
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) / 2;
    const uint32_t out =
        Select(magnitude < 2, std::bit_cast<uint32_t>(small), normal);
    return std::bit_cast<float>(out | (uint32_t{code} << 28 & 0x80000000u));
  }
};

// 2 to the power of code - 127, as a scale; the last code is NaN.
struct E8M0 {
  using Element = uint8_t;
  static float ToFloat(uint8_t code) {
    const uint32_t power = Select(code == 0, 0x00400000u, uint32_t{code} << 23);
    return std::bit_cast<float>(Select(code == 0xff, 0x7fc00000u, power));
  }
};

struct Bfloat {
  using Element = uint16_t;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = 0x7f7f8000;
  static uint16_t FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(
        Select((bits & 0x7fffffffu) > kInfinity, 0x7fc0u, rounded));
  }
  static float ToFloat(uint16_t element) {
    return std::bit_cast<float>(uint32_t{element} << 16);
  }
};

struct Single {
  using Element = float;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = kInfinity;
  static float FromFloat(float value) { return value; }
  static float ToFloat(float element) { return element; }
};

struct Double {
  using Element = double;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = kInfinity;
  static double FromFloat(float value) { return value; }
  static float ToFloat(double element) { return static_cast<float>(element); }
};

}  // namespace torch_ckpt::float_types
