#include "format/cast.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace torch_ckpt {
namespace {

// A float type of at most 16 bits: sign, exponent, `mantissa` bits.
// Without the sign, `largest` is the code of what is too large (infinity, or
// the largest number where there is none) and `nan` that of a NaN.
template <class Code, int mantissa, int bias, uint32_t largest, uint32_t nan>
struct Narrow {
  using Element = Code;
  static constexpr int kShift = 23 - mantissa;
  static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Code));

  static Code FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal: other bias, rounded at the last bit that stays.
    const uint32_t biased =
        magnitude - (static_cast<uint32_t>(127 - bias) << 23);
    uint32_t code =
        (biased + ((1u << (kShift - 1)) - 1) + ((biased >> kShift) & 1)) >>
        kShift;
    if (code > largest) code = largest;
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
    if (magnitude < kSmallestNormal) code = small;
    if (magnitude > 0x7f800000u) code = nan;
    return static_cast<Code>(code | ((bits & 0x80000000u) >> kSignShift));
  }

  static float ToFloat(Code element) {
    const uint32_t bits = element;
    const uint32_t sign = bits << kSignShift & 0x80000000u;
    const uint32_t magnitude = bits & ((1u << (8 * sizeof(Code) - 1)) - 1);
    const uint32_t field = magnitude & ((1u << mantissa) - 1);
    uint32_t out =
        (magnitude << kShift) + (static_cast<uint32_t>(127 - bias) << 23);
    if (magnitude < 1u << mantissa) {
      const float smallest = std::bit_cast<float>(
          static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23);
      out = std::bit_cast<uint32_t>(static_cast<float>(field) * smallest);
    }
    if (kHasInfinity && magnitude == largest) out = 0x7f800000u;
    if (magnitude > largest) out = 0x7fc00000u;
    return std::bit_cast<float>(out | sign);
  }

 private:
  // Its mantissa is 0 then.
  static constexpr bool kHasInfinity = (largest & ((1u << mantissa) - 1)) == 0;
};

using Half = Narrow<uint16_t, 10, 15, 0x7c00, 0x7e00>;
using E5M2 = Narrow<uint8_t, 2, 15, 0x7c, 0x7f>;
using E4M3 = Narrow<uint8_t, 3, 7, 0x7e, 0x7f>;

struct Bfloat {
  using Element = uint16_t;
  static uint16_t FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0
                                                                    : rounded);
  }
  static float ToFloat(uint16_t element) {
    return std::bit_cast<float>(uint32_t{element} << 16);
  }
};

struct Single {
  using Element = float;
  static float FromFloat(float value) { return value; }
  static float ToFloat(float element) { return element; }
};

struct Double {
  using Element = double;
  static double FromFloat(float value) { return value; }
  static float ToFloat(double element) { return static_cast<float>(element); }
};

// What the loops below hold between reading and writing: in the first cache.
constexpr size_t kChunk = 1024;

template <class Type>
void Read(const std::byte* source, float* out, size_t count) {
  using Element = typename Type::Element;
  std::array<Element, kChunk> elements;
  std::memcpy(elements.data(), source, count * sizeof(Element));
  for (size_t i = 0; i < count; ++i) out[i] = Type::ToFloat(elements[i]);
}

template <class Type>
void Write(const float* values, std::byte* target, size_t count) {
  using Element = typename Type::Element;
  std::array<Element, kChunk> elements;
  for (size_t i = 0; i < count; ++i) elements[i] = Type::FromFloat(values[i]);
  std::memcpy(target, elements.data(), count * sizeof(Element));
}

struct Functions {
  void (*read)(const std::byte*, float*, size_t) = nullptr;
  void (*write)(const float*, std::byte*, size_t) = nullptr;
};

template <class Type>
constexpr Functions FunctionsFor() {
  return {Read<Type>, Write<Type>};
}

Functions FunctionsOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF64:
      return FunctionsFor<Double>();
    case Dtype::kF32:
      return FunctionsFor<Single>();
    case Dtype::kF16:
      return FunctionsFor<Half>();
    case Dtype::kBF16:
      return FunctionsFor<Bfloat>();
    case Dtype::kF8E4M3:
      return FunctionsFor<E4M3>();
    case Dtype::kF8E5M2:
      return FunctionsFor<E5M2>();
    default:
      return {};
  }
}

}  // namespace

bool CanCast(Dtype from, Dtype to) {
  return FunctionsOf(from).read != nullptr && FunctionsOf(to).write != nullptr;
}

void CastElements(Dtype from, const std::byte* source, Dtype to,
                  std::byte* target, size_t count) {
  const auto source_bytes = static_cast<size_t>(DtypeBits(from)) / 8;
  const auto target_bytes = static_cast<size_t>(DtypeBits(to)) / 8;
  const Functions in = FunctionsOf(from), out = FunctionsOf(to);
  std::array<float, kChunk> values;
  for (size_t at = 0; at < count; at += kChunk) {
    const size_t size = std::min(kChunk, count - at);
    in.read(source + at * source_bytes, values.data(), size);
    out.write(values.data(), target + at * target_bytes, size);
  }
}

}  // namespace torch_ckpt
