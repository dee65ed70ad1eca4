#include "values/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstring>

#include "values/numbers.h"

namespace torch_ckpt {
namespace {

constexpr size_t kComparedAtOnce =
    1024;  // elements that are held as numbers at once

// Whether |a - b| = `apart` counts as equal, of the size of b.
bool Within(const Tolerances& allowed, double apart, double size) {
  return std::isfinite(apart) &&
         apart <= allowed.absolute + allowed.relative * size;
}

// What two doubles are apart: 0 where they are equal, and of two NaNs.
double Apart(double x, double y) {
  const bool same = x == y || (x != x && y != y);
  return same ? 0 : std::fabs(x - y);
}

Difference CompareReal(const double* x, const double* y, size_t count,
                       const Tolerances& allowed) {
  const bool exact = allowed.absolute == 0 && allowed.relative == 0;
  Difference out;
  bool nan = false;
  for (size_t i = 0; i < count; ++i) {
    const double apart = Apart(x[i], y[i]);
    const bool close =
        apart == 0 || (!exact && Within(allowed, apart, std::fabs(y[i])));
    out.count += close ? 0 : 1;
    out.largest = apart > out.largest ? apart : out.largest;
    nan = nan || apart != apart;
  }
  if (nan) out.largest = std::nan("");
  return out;
}

Difference CompareComplex(const double* x, const double* y, size_t count,
                          const Tolerances& allowed) {
  const auto is_nan = [](const double* at) {
    return std::isnan(at[0]) || std::isnan(at[1]);
  };
  Difference out;
  for (size_t i = 0; i < count; ++i, x += 2, y += 2) {
    if ((x[0] == y[0] && x[1] == y[1]) || (is_nan(x) && is_nan(y))) continue;
    const double apart = std::hypot(Apart(x[0], y[0]), Apart(x[1], y[1]));
    const bool close =
        Within(allowed, apart, std::abs(std::complex(y[0], y[1])));
    out.Add({close ? uint64_t{0} : uint64_t{1}, apart});
  }
  return out;
}

// int64 or uint64.
template <class Integer>
Difference CompareIntegers(const int64_t* x, const int64_t* y, size_t count,
                           const Tolerances& allowed) {
  Difference out;
  uint64_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto a = static_cast<Integer>(x[i]), b = static_cast<Integer>(y[i]);
    const uint64_t apart =
        a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b)
              : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
    const bool close = apart == 0 || Within(allowed, static_cast<double>(apart),
                                            std::fabs(static_cast<double>(b)));
    out.count += close ? 0 : 1;
    largest = std::max(largest, apart);
  }
  out.largest = static_cast<double>(largest);
  return out;
}

// What elements of both are compared as.
NumberKind CommonKind(Dtype a, Dtype b) {
  const NumberKind x = NumberKindOf(a), y = NumberKindOf(b);
  if (x == NumberKind::kNone || y == NumberKind::kNone) {
    return NumberKind::kNone;
  }
  for (const NumberKind kind : {NumberKind::kComplex, NumberKind::kReal}) {
    if (x == kind || y == kind) return kind;
  }
  return x == y ? x : NumberKind::kReal;  // not all of uint64 is in int64
}

void ToComplex(Dtype dtype, const std::byte* from, size_t count, double* to) {
  ToDoubles(dtype, from, count, to);
  if (NumberKindOf(dtype) == NumberKind::kComplex) return;
  for (size_t i = count; i-- > 0;) {
    to[2 * i] = to[i];
    to[2 * i + 1] = 0;
  }
}

// Of at most kComparedAtOnce elements, as numbers.
Difference CompareNumbers(Dtype a, const std::byte* x, Dtype b,
                          const std::byte* y, size_t count,
                          const Tolerances& allowed) {
  const NumberKind kind = CommonKind(a, b);
  if (kind == NumberKind::kInteger || kind == NumberKind::kUnsigned) {
    std::array<int64_t, kComparedAtOnce> left, right;
    ToIntegers(a, x, count, left.data());
    ToIntegers(b, y, count, right.data());
    return kind == NumberKind::kInteger
               ? CompareIntegers<int64_t>(left.data(), right.data(), count,
                                          allowed)
               : CompareIntegers<uint64_t>(left.data(), right.data(), count,
                                           allowed);
  }
  std::array<double, 2 * kComparedAtOnce> left, right;
  if (kind == NumberKind::kComplex) {
    ToComplex(a, x, count, left.data());
    ToComplex(b, y, count, right.data());
    return CompareComplex(left.data(), right.data(), count, allowed);
  }
  ToDoubles(a, x, count, left.data());
  ToDoubles(b, y, count, right.data());
  return CompareReal(left.data(), right.data(), count, allowed);
}

template <class Bits>
uint64_t CountOtherBits(const std::byte* x, const std::byte* y, size_t count) {
  std::array<Bits, kComparedAtOnce> left, right;
  std::memcpy(left.data(), x, count * sizeof(Bits));
  std::memcpy(right.data(), y, count * sizeof(Bits));
  uint64_t other = 0;
  for (size_t i = 0; i < count; ++i) other += left[i] != right[i] ? 1 : 0;
  return other;
}

// Of elements that share bytes, of which the first has the lowest bits.
uint64_t CountOtherParts(Dtype dtype, const std::byte* x, const std::byte* y,
                         size_t count) {
  const Unit unit = DtypeUnit(dtype);
  const int bits = DtypeBits(dtype);
  const auto bytes = static_cast<size_t>(unit.bytes);
  uint64_t other = 0;
  for (size_t at = 0; at < count; at += static_cast<size_t>(unit.elements)) {
    uint32_t left = 0, right = 0;
    std::memcpy(&left, x, bytes);
    std::memcpy(&right, y, bytes);
    for (uint32_t rest = left ^ right; rest != 0; rest >>= bits) {
      other += (rest & ((1u << bits) - 1)) != 0 ? 1 : 0;
    }
    x += bytes;
    y += bytes;
  }
  return other;
}

uint64_t CountOthers(Dtype dtype, const std::byte* x, const std::byte* y,
                     size_t count) {
  switch (DtypeBits(dtype)) {
    case 8:
      return CountOtherBits<uint8_t>(x, y, count);
    case 16:
      return CountOtherBits<uint16_t>(x, y, count);
    case 32:
      return CountOtherBits<uint32_t>(x, y, count);
    case 64:
      return CountOtherBits<uint64_t>(x, y, count);
    default:
      return CountOtherParts(dtype, x, y, count);
  }
}

size_t BytesOf(Dtype dtype, size_t count) {
  return count * static_cast<size_t>(DtypeBits(dtype)) / 8;
}

}  // namespace

void Difference::Add(const Difference& other) {
  count += other.count;
  if (std::isnan(other.largest) || other.largest > largest) {
    largest = other.largest;
  }
}

Difference CompareElements(Dtype a, const std::byte* x, Dtype b,
                           const std::byte* y, size_t count,
                           const Tolerances& tolerances) {
  const bool by_bits =
      a == b && (NumberKindOf(a) == NumberKind::kNone ||
                 (tolerances.relative == 0 && tolerances.absolute == 0));
  const bool numbers = CommonKind(a, b) != NumberKind::kNone;
  Difference out;
  for (size_t at = 0; at < count; at += kComparedAtOnce) {
    const size_t size = std::min(kComparedAtOnce, count - at);
    const std::byte* const left = x + BytesOf(a, at);
    const std::byte* const right = y + BytesOf(b, at);
    // Equal bits are equal in any way: a NaN equals itself here.
    if (a == b && std::memcmp(left, right, BytesOf(a, size)) == 0) continue;
    Difference here;
    if (numbers) here = CompareNumbers(a, left, b, right, size, tolerances);
    if (by_bits) here.count = CountOthers(a, left, right, size);
    out.Add(here);
  }
  return out;
}

}  // namespace torch_ckpt
