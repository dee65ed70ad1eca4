// Numbers of types that are looked up, by their definitions; of all others, and
// what is computed of them, tests/python compares with torch's.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "values/compare.h"
#include "values/numbers.h"
#include "values/statistics.h"

namespace torch_ckpt {
namespace {

double NumberOf(Dtype dtype, uint8_t code) {
  const auto byte = std::byte{code};
  double out = 0;
  ToDoubles(dtype, &byte, 1, &out);
  return out;
}

TEST(NumbersTest, LookedUp) {
  EXPECT_EQ(NumberOf(Dtype::kF8E8M0, 127), 1);
  EXPECT_EQ(NumberOf(Dtype::kF8E8M0, 0), std::ldexp(1.0, -127));
  EXPECT_EQ(NumberOf(Dtype::kF8E8M0, 254), std::ldexp(1.0, 127));
  EXPECT_TRUE(std::isnan(NumberOf(Dtype::kF8E8M0, 255)));
  for (const Dtype dtype : {Dtype::kF8E4M3Fnuz, Dtype::kF8E5M2Fnuz}) {
    EXPECT_EQ(NumberOf(dtype, 0), 0);
    EXPECT_TRUE(std::isnan(NumberOf(dtype, 0x80)));
  }
  EXPECT_EQ(NumberOf(Dtype::kF8E4M3Fnuz, 0x7f), 240);
  EXPECT_EQ(NumberOf(Dtype::kF8E4M3Fnuz, 0xff), -240);
  EXPECT_EQ(NumberOf(Dtype::kF8E4M3Fnuz, 1), std::ldexp(1.0, -10));
  EXPECT_EQ(NumberOf(Dtype::kF8E5M2Fnuz, 0x7f), 57344);
  EXPECT_EQ(NumberOf(Dtype::kF8E5M2Fnuz, 0x84), -std::ldexp(1.0, -15));
}

TEST(NumbersTest, PackedElementsAreCountedByTheirBits) {
  const std::vector<std::byte> x(6),
      y = {std::byte{0x11}, std::byte{0x10}, std::byte{0},
           std::byte{0},    std::byte{0x08}, std::byte{0xf0}};
  const Difference four =
      CompareElements(Dtype::kF4, x.data(), Dtype::kF4, y.data(), 12, {});
  EXPECT_EQ(four.count, 5u);
  EXPECT_EQ(four.largest, 0);
  // Of 6 bits, the lowest first: 0x001011 and 0xf00800.
  EXPECT_EQ(CompareElements(Dtype::kF6E2M3, x.data(), Dtype::kF6E2M3, y.data(),
                            8, {1, 1})
                .count,
            4u);
  EXPECT_EQ(
      CompareElements(Dtype::kF4, x.data(), Dtype::kU8, y.data(), 6, {}).count,
      0u);
}

TEST(StatisticsTest, SumsThatNoDoubleHolds) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const std::vector<double> large(3000, kMost);
  const auto* bytes = reinterpret_cast<const std::byte*>(large.data());
  EXPECT_EQ(StatisticsOf(Dtype::kF64, bytes, large.size()).Mean(), kMost);
  const std::vector<uint64_t> integers(5000, ~uint64_t{0});
  const Statistics found = StatisticsOf(
      Dtype::kU64, reinterpret_cast<const std::byte*>(integers.data()), 5000);
  EXPECT_EQ(found.least, static_cast<WideNumber>(~uint64_t{0}));
  EXPECT_EQ(found.sum, static_cast<WideNumber>(~uint64_t{0}) * 5000);
  EXPECT_EQ(StatisticsOf(Dtype::kF32, bytes, 0).finite, 0u);
}

}  // namespace
}  // namespace torch_ckpt
