#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "plan/join.h"

namespace torch_ckpt {
namespace {

TEST(JoinBoxes, TilesMakeABoxAndNothingElseDoes) {
  EXPECT_EQ(JoinBoxes({}), std::nullopt);
  EXPECT_EQ(JoinBoxes({{{2, 1}, {3, 4}}}), (Box{{2, 1}, {3, 4}}));
  EXPECT_EQ(JoinBoxes({{{4, 1}, {1, 4}}, {{2, 1}, {2, 4}}}),
            (Box{{2, 1}, {3, 4}}));
  EXPECT_EQ(JoinBoxes({{{}, {}}}), Box());
  // A hole; an overlap; both, as many elements as the hull has.
  EXPECT_EQ(JoinBoxes({{{0}, {2}}, {{3}, {2}}}), std::nullopt);
  EXPECT_EQ(JoinBoxes({{{0}, {2}}, {{1}, {2}}}), std::nullopt);
  EXPECT_EQ(JoinBoxes({{{0}, {3}}, {{1}, {1}}, {{4}, {1}}}), std::nullopt);
  EXPECT_EQ(JoinBoxes({{{0}, {2}}, {{0}, {2}}}), std::nullopt);
  EXPECT_EQ(JoinBoxes({{{0}, {2}}, {{0, 0}, {2, 2}}}), std::nullopt);
  // No cut goes through these five, and they tile a box.
  EXPECT_EQ(JoinBoxes({{{0, 0}, {1, 2}},
                       {{0, 2}, {2, 1}},
                       {{2, 1}, {1, 2}},
                       {{1, 0}, {2, 1}},
                       {{1, 1}, {1, 1}}}),
            (Box{{0, 0}, {3, 3}}));
}

TEST(JoinBoxes, NumbersAtTheLimits) {
  constexpr int64_t kMost = (int64_t{1} << 48) - 1;
  EXPECT_EQ(JoinBoxes({{{0}, {kMost - 1}}, {{kMost - 1}, {1}}}),
            (Box{{0}, {kMost}}));
  const std::vector<Box> many(1 << 16, Box{{0}, {kMost}});
  EXPECT_EQ(JoinBoxes(many), std::nullopt);
}

TEST(JoinBoxes, WhatACutLeavesIsJoinedUnlessOneIsMissing) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    Box whole;
    for (int64_t d = pick(1, 4); d > 0; --d) {
      whole.offsets.push_back(pick(0, 5));
      whole.sizes.push_back(pick(1, 6));
    }
    std::vector<Box> boxes = {whole};
    for (int cuts = 0; cuts < 6; ++cuts) {
      Box& low = boxes[static_cast<size_t>(
          pick(0, static_cast<int64_t>(boxes.size()) - 1))];
      const int d = static_cast<int>(pick(0, whole.rank() - 1));
      if (low.sizes[d] == 1) continue;
      Box high = low;
      low.sizes[d] = pick(1, low.sizes[d] - 1);
      high.offsets[d] += low.sizes[d];
      high.sizes[d] -= low.sizes[d];
      boxes.push_back(high);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    EXPECT_EQ(JoinBoxes(boxes), whole);
    if (boxes.size() < 3) continue;
    boxes.pop_back();
    const auto rest = JoinBoxes(boxes);
    int64_t elements = 0;
    for (const Box& box : boxes) elements += box.Volume();
    // A box again where a whole side was missing.
    EXPECT_TRUE(!rest || rest->Volume() == elements);
  }
}

}  // namespace
}  // namespace torch_ckpt
