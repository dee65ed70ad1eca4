#include "values/statistics.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace torch_ckpt {
namespace {

constexpr size_t kCountedAtOnce =
    1024;  // elements that are held as numbers at once

Statistics OfReal(const double* numbers, size_t count) {
  Statistics out;
  // Those that are not finite go out of the way.
  std::array<double, kCountedAtOnce> finite;
  size_t size = 0;
  for (size_t i = 0; i < count; ++i) {
    finite[size] = numbers[i];
    size += std::isfinite(numbers[i]) ? 1 : 0;
    out.nan += std::isnan(numbers[i]) ? 1 : 0;
  }
  out.finite = size;
  out.infinite = count - size - out.nan;
  if (size == 0) return out;
  const auto end = finite.begin() + static_cast<ptrdiff_t>(size);
  const auto [least, largest] = std::minmax_element(finite.begin(), end);
  out.least = *least;
  out.largest = *largest;
  // Sums of doubles may be too large for one.
  double sum = 0;
  for (size_t i = 0; i < size; ++i) sum += finite[i];
  out.sum = sum;
  if (!std::isfinite(sum)) {
    out.sum = 0;
    for (size_t i = 0; i < size; ++i) out.sum += finite[i];
  }
  return out;
}

Statistics OfComplex(const double* numbers, size_t count) {
  Statistics out;
  for (size_t i = 0; i < count; ++i, numbers += 2) {
    const bool nan = std::isnan(numbers[0]) || std::isnan(numbers[1]);
    const bool infinite = std::isinf(numbers[0]) || std::isinf(numbers[1]);
    out.nan += nan ? 1 : 0;
    out.infinite += infinite ? 1 : 0;
    out.finite += nan || infinite ? 0 : 1;
  }
  return out;
}

// int64 or uint64.
template <class Integer>
Statistics OfIntegers(const int64_t* numbers, size_t count) {
  Statistics out;
  out.finite = count;
  auto least = static_cast<Integer>(numbers[0]);
  Integer largest = least, high = 0;
  uint64_t low = 0;
  // In halves, whose sums are exact.
  for (size_t i = 0; i < count; ++i) {
    const auto number = static_cast<Integer>(numbers[i]);
    least = std::min(least, number);
    largest = std::max(largest, number);
    high += number >> 32;
    low += static_cast<uint32_t>(number);
  }
  out.least = static_cast<WideNumber>(least);
  out.largest = static_cast<WideNumber>(largest);
  out.sum =
      static_cast<WideNumber>(high) * 0x1p32L + static_cast<WideNumber>(low);
  return out;
}

}  // namespace

void Statistics::Add(const Statistics& other) {
  if (other.finite > 0) {
    least = finite > 0 ? std::min(least, other.least) : other.least;
    largest = finite > 0 ? std::max(largest, other.largest) : other.largest;
  }
  finite += other.finite;
  nan += other.nan;
  infinite += other.infinite;
  sum += other.sum;
}

double Statistics::Mean() const {
  // Rounding may have made it too large for a double.
  return static_cast<double>(
      std::clamp(sum / static_cast<WideNumber>(finite), least, largest));
}

Statistics StatisticsOf(Dtype dtype, const std::byte* from, size_t count) {
  const NumberKind kind = NumberKindOf(dtype);
  const auto bytes = static_cast<size_t>(DtypeBits(dtype)) / 8;
  std::array<double, 2 * kCountedAtOnce> reals;
  std::array<int64_t, kCountedAtOnce> integers;
  Statistics out;
  for (size_t at = 0; at < count; at += kCountedAtOnce) {
    const size_t size = std::min(kCountedAtOnce, count - at);
    const std::byte* const here = from + at * bytes;
    switch (kind) {
      case NumberKind::kInteger:
        ToIntegers(dtype, here, size, integers.data());
        out.Add(OfIntegers<int64_t>(integers.data(), size));
        break;
      case NumberKind::kUnsigned:
        ToIntegers(dtype, here, size, integers.data());
        out.Add(OfIntegers<uint64_t>(integers.data(), size));
        break;
      case NumberKind::kReal:
        ToDoubles(dtype, here, size, reals.data());
        out.Add(OfReal(reals.data(), size));
        break;
      default:
        ToDoubles(dtype, here, size, reals.data());
        out.Add(OfComplex(reals.data(), size));
    }
  }
  return out;
}

}  // namespace torch_ckpt
