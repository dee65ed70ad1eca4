#include "values/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "values/cast.h"

namespace torch_ckpt {
namespace {

constexpr size_t kConvertedAtOnce = 1024;

template <class Element, class Number>
void Convert(const std::byte* from, size_t count, Number* to) {
  std::array<Element, kConvertedAtOnce> elements;
  for (size_t at = 0; at < count; at += kConvertedAtOnce) {
    const size_t size = std::min(kConvertedAtOnce, count - at);
    std::memcpy(elements.data(), from + at * sizeof(Element),
                size * sizeof(Element));
    for (size_t i = 0; i < size; ++i) {
      to[at + i] = static_cast<Number>(elements[i]);
    }
  }
}

template <class Number>
void ConvertBools(const std::byte* from, size_t count, Number* to) {
  for (size_t i = 0; i < count; ++i) to[i] = from[i] != std::byte{0} ? 1 : 0;
}

// Of kInteger and kUnsigned.
template <class Number>
void ConvertIntegers(Dtype dtype, const std::byte* from, size_t count,
                     Number* to) {
  switch (dtype) {
    case Dtype::kBool:
      return ConvertBools(from, count, to);
    case Dtype::kU8:
      return Convert<uint8_t>(from, count, to);
    case Dtype::kI8:
      return Convert<int8_t>(from, count, to);
    case Dtype::kI16:
      return Convert<int16_t>(from, count, to);
    case Dtype::kU16:
      return Convert<uint16_t>(from, count, to);
    case Dtype::kI32:
      return Convert<int32_t>(from, count, to);
    case Dtype::kU32:
      return Convert<uint32_t>(from, count, to);
    case Dtype::kU64:
      return Convert<uint64_t>(from, count, to);
    default:
      return Convert<int64_t>(from, count, to);
  }
}

// All numbers of a type of 8 bits.
using Table = std::array<double, 256>;

Table PowersOfTwo() {
  Table table;
  for (int code = 0; code < 255; ++code) {
    table[static_cast<size_t>(code)] = std::ldexp(1.0, code - 127);
  }
  table[255] = std::numeric_limits<double>::quiet_NaN();
  return table;
}

// Without infinities or a negative zero, whose code is the only NaN.
Table FiniteAndUnsignedZero(int mantissa, int bias) {
  Table table;
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code & 0x7f) >> mantissa;
    const int field = code & ((1 << mantissa) - 1);
    const int significand = exponent == 0 ? field : field + (1 << mantissa);
    const double size =
        std::ldexp(significand, std::max(exponent, 1) - bias - mantissa);
    table[static_cast<size_t>(code)] = code < 128 ? size : -size;
  }
  table[128] = std::numeric_limits<double>::quiet_NaN();
  return table;
}

void LookUp(const Table& table, const std::byte* from, size_t count,
            double* to) {
  for (size_t i = 0; i < count; ++i) {
    to[i] = table[std::to_integer<size_t>(from[i])];
  }
}

void FloatsToDoubles(Dtype dtype, const std::byte* from, size_t count,
                     double* to) {
  const auto element = static_cast<size_t>(DtypeBits(dtype)) / 8;
  std::array<float, kConvertedAtOnce> floats;
  for (size_t at = 0; at < count; at += kConvertedAtOnce) {
    const size_t size = std::min(kConvertedAtOnce, count - at);
    CastElements(dtype, from + at * element, Dtype::kF32,
                 reinterpret_cast<std::byte*>(floats.data()), size);
    std::copy_n(floats.begin(), size, to + at);
  }
}

}  // namespace

NumberKind NumberKindOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF4:
    case Dtype::kF6E2M3:
    case Dtype::kF6E3M2:
      return NumberKind::kNone;
    case Dtype::kBool:
    case Dtype::kU8:
    case Dtype::kI8:
    case Dtype::kI16:
    case Dtype::kU16:
    case Dtype::kI32:
    case Dtype::kU32:
    case Dtype::kI64:
      return NumberKind::kInteger;
    case Dtype::kU64:
      return NumberKind::kUnsigned;
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3:
    case Dtype::kF8E8M0:
    case Dtype::kF8E4M3Fnuz:
    case Dtype::kF8E5M2Fnuz:
    case Dtype::kF16:
    case Dtype::kBF16:
    case Dtype::kF32:
    case Dtype::kF64:
      return NumberKind::kReal;
    case Dtype::kC64:
      return NumberKind::kComplex;
  }
  return NumberKind::kNone;
}

void ToDoubles(Dtype dtype, const std::byte* from, size_t count, double* to) {
  static const Table kE8M0 = PowersOfTwo();
  static const Table kE4M3Fnuz = FiniteAndUnsignedZero(3, 8);
  static const Table kE5M2Fnuz = FiniteAndUnsignedZero(2, 16);
  switch (dtype) {
    case Dtype::kF8E8M0:
      return LookUp(kE8M0, from, count, to);
    case Dtype::kF8E4M3Fnuz:
      return LookUp(kE4M3Fnuz, from, count, to);
    case Dtype::kF8E5M2Fnuz:
      return LookUp(kE5M2Fnuz, from, count, to);
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3:
    case Dtype::kF16:
    case Dtype::kBF16:
      return FloatsToDoubles(dtype, from, count, to);
    case Dtype::kF32:
      return Convert<float>(from, count, to);
    case Dtype::kF64:
      return Convert<double>(from, count, to);
    case Dtype::kC64:
      return Convert<float>(from, 2 * count, to);
    default:
      return ConvertIntegers(dtype, from, count, to);
  }
}

void ToIntegers(Dtype dtype, const std::byte* from, size_t count, int64_t* to) {
  ConvertIntegers(dtype, from, count, to);
}

}  // namespace torch_ckpt
