#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "plan/ranges.h"

namespace torch_ckpt {
namespace {

// The row-major positions of a box's elements, in the box's own order.
std::vector<int64_t> Positions(const Dims& shape, const Box& box) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < box.Volume(); ++i) {
    int64_t rest = i, at = 0, stride = 1;
    for (int d = shape.size() - 1; d >= 0; --d) {
      at += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
      stride *= shape[d];
    }
    out.push_back(at);
  }
  return out;
}

TEST(BoxesOfRange, HeadRowsTail) {
  EXPECT_EQ(
      BoxesOfRange({4, 5}, 3, 17),
      (std::vector<Box>{{{0, 3}, {1, 2}}, {{1, 0}, {2, 5}}, {{3, 0}, {1, 2}}}));
  EXPECT_EQ(BoxesOfRange({4, 5}, 6, 8), (std::vector<Box>{{{1, 1}, {1, 2}}}));
  EXPECT_EQ(BoxesOfRange({4, 5}, 0, 20), (std::vector<Box>{{{0, 0}, {4, 5}}}));
  EXPECT_EQ(BoxesOfRange({}, 0, 1), (std::vector<Box>{{{}, {}}}));
  EXPECT_TRUE(BoxesOfRange({}, 0, 0).empty());
  EXPECT_TRUE(BoxesOfRange({0, 7}, 0, 0).empty());
}

TEST(BoxesOfRange, RandomRangesInOrderAndFew) {
  std::mt19937_64 rng(7);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  for (int round = 0; round < 3000; ++round) {
    Dims shape;
    const int64_t rank = pick(0, 5);
    for (int64_t d = 0; d < rank; ++d) shape.push_back(pick(1, 5));
    const int64_t begin = pick(0, shape.Product());
    const int64_t end = pick(begin, shape.Product());
    const std::vector<Box> boxes = BoxesOfRange(shape, begin, end);
    EXPECT_LE(static_cast<int64_t>(boxes.size()),
              std::max<int64_t>(1, 2 * rank - 1));
    int64_t next = begin;
    for (const Box& box : boxes) {
      ASSERT_TRUE(Inside(box, shape));
      EXPECT_FALSE(box.Empty());
      for (int64_t at : Positions(shape, box)) EXPECT_EQ(at, next++);
    }
    EXPECT_EQ(next, end);
  }
}

TEST(BalancedCuts, Examples) {
  EXPECT_EQ(BalancedCuts(10, 2, 1), (std::vector<uint64_t>{0, 5, 10}));
  EXPECT_EQ(BalancedCuts(9, 2, 4), (std::vector<uint64_t>{0, 4, 9}));
  EXPECT_EQ(BalancedCuts(0, 3, 8), (std::vector<uint64_t>{0, 0, 0, 0}));
  EXPECT_EQ(BalancedCuts(5, 1, 8), (std::vector<uint64_t>{0, 5}));
  EXPECT_EQ(BalancedCuts(UINT64_MAX, 1, 4096).back(), UINT64_MAX);
}

TEST(BalancedCuts, RandomCutsDifferByAtMostOneGrain) {
  std::mt19937_64 rng(8);
  const auto pick = [&](uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(rng);
  };
  for (int round = 0; round < 3000; ++round) {
    const uint64_t total = pick(0, 200), grain = pick(1, 20);
    const int parts = static_cast<int>(pick(1, 12));
    const std::vector<uint64_t> cuts = BalancedCuts(total, parts, grain);
    ASSERT_EQ(cuts.size(), static_cast<size_t>(parts) + 1);
    EXPECT_EQ(cuts.front(), 0u);
    EXPECT_EQ(cuts.back(), total);
    uint64_t least = total, most = 0;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      ASSERT_LE(cuts[i], cuts[i + 1]);
      EXPECT_TRUE(cuts[i] == total || cuts[i] % grain == 0);
      least = std::min(least, cuts[i + 1] - cuts[i]);
      most = std::max(most, cuts[i + 1] - cuts[i]);
    }
    EXPECT_LE(most - least, grain) << total << " " << parts << " " << grain;
  }
}

}  // namespace
}  // namespace torch_ckpt
