#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "budget_test_util.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

using Boxes = std::vector<Box>;

bool Hits(const Box& box, const Dims& point) {
  for (int d = 0; d < box.rank(); ++d) {
    if (point[d] < box.offsets[d] ||
        point[d] >= box.offsets[d] + box.sizes[d]) {
      return false;
    }
  }
  return true;
}

struct Counts {
  bool hole = false;
  bool overlap = false;
};

// Counts, cell by cell, how many boxes hold each cell of the region.
Counts Oracle(const Box& region, const Boxes& boxes) {
  Counts out;
  for (int64_t i = 0; i < region.Volume(); ++i) {
    Dims point = region.offsets;
    int64_t rest = i;
    for (int d = region.rank() - 1; d >= 0; --d) {
      point[d] += rest % region.sizes[d];
      rest /= region.sizes[d];
    }
    int hits = 0;
    for (const Box& box : boxes) hits += Hits(box, point) ? 1 : 0;
    out.hole |= hits == 0;
    out.overlap |= hits > 1;
  }
  return out;
}

// What ProveTiling says of boxes that lie inside the region.
ErrorKind OfTiling(const Counts& truth) {
  if (truth.overlap) return ErrorKind::kConflict;
  return truth.hole ? ErrorKind::kIncomplete : ErrorKind::kOk;
}

class RandomBoxes : public ::testing::Test {
 protected:
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }

  void Cut(const Box& box, int cuts, Boxes* out) {
    if (cuts == 0 || box.rank() == 0) return out->push_back(box);
    const int d = static_cast<int>(Pick(0, box.rank() - 1));
    const int64_t at = Pick(0, box.sizes[d]);  // empty halves happen
    Box low = box, high = box;
    low.sizes[d] = at;
    high.offsets[d] += at;
    high.sizes[d] -= at;
    Cut(low, cuts - 1, out);
    Cut(high, cuts - 1, out);
  }

  Box RandomRegion() {
    Box region;
    const int64_t rank = Pick(0, 3);
    for (int64_t d = 0; d < rank; ++d) {
      region.offsets.push_back(Pick(0, 2));
      region.sizes.push_back(Pick(1, 9));
    }
    return region;
  }

  std::mt19937_64 rng_{99};
};

TEST_F(RandomBoxes, ProofsAgreeWithCells) {
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE(round);
    const Box region = RandomRegion();
    Boxes boxes;
    Cut(region, static_cast<int>(Pick(0, 5)), &boxes);
    std::shuffle(boxes.begin(), boxes.end(), rng_);
    ASSERT_TRUE(ProveTiling(region, boxes).ok());
    ASSERT_TRUE(ProveDisjoint(boxes).ok());
    const size_t victim =
        static_cast<size_t>(Pick(0, static_cast<int64_t>(boxes.size()) - 1));
    const int64_t damage = Pick(0, 3);
    if (damage == 0) {
      boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(victim));
    } else if (damage == 1) {
      boxes.push_back(boxes[victim]);
    } else if (region.rank() > 0) {
      const int d = static_cast<int>(Pick(0, region.rank() - 1));
      (damage == 2 ? boxes[victim].offsets : boxes[victim].sizes)[d] +=
          boxes[victim].sizes[d] > 0 ? Pick(-1, 1) : 0;
    }
    // Only what is inside counts for the oracle; shifted boxes may reach out.
    bool outside = false;
    for (const Box& box : boxes) {
      if (box.Empty()) continue;
      for (int d = 0; d < region.rank(); ++d) {
        outside |=
            box.offsets[d] < region.offsets[d] ||
            box.offsets[d] + box.sizes[d] > region.offsets[d] + region.sizes[d];
      }
    }
    const Counts truth = Oracle(region, boxes);
    if (outside) {
      EXPECT_EQ(ProveTiling(region, boxes).kind(), ErrorKind::kInvalidArgument);
      continue;
    }
    EXPECT_EQ(ProveDisjoint(boxes).ok(), !truth.overlap);
    EXPECT_EQ(ProveTiling(region, boxes).kind(), OfTiling(truth));
  }
}

TEST_F(RandomBoxes, OverlappingHeapsAgreeWithCells) {
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    const Box region = RandomRegion();
    Boxes boxes;
    for (int64_t n = Pick(0, 25); n > 0; --n) {
      Box box;
      for (int d = 0; d < region.rank(); ++d) {
        box.offsets.push_back(Pick(-1, 8));
        box.sizes.push_back(Pick(0, 12));
      }
      boxes.push_back(box);
    }
    const Counts truth = Oracle(region, boxes);
    EXPECT_TRUE(!truth.overlap || !ProveDisjoint(boxes).ok());
  }
}

// Pinwheels cannot be cut anywhere, so only the sweep finds their overlaps. In
// three dimensions some of the boxes are cut in two along the third.
TEST_F(RandomBoxes, InterlockedBoxesAgreeWithCells) {
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE(round);
    Box region = Box::Whole({Pick(5, 14), Pick(5, 14)});
    Boxes boxes;
    Box core = region;
    while (core.sizes[0] >= 3 && core.sizes[1] >= 3) {
      const int64_t r = core.offsets[0], h = core.sizes[0];
      const int64_t c = core.offsets[1], w = core.sizes[1];
      const int64_t r1 = Pick(1, h - 2), r2 = Pick(r1 + 1, h - 1);
      const int64_t c1 = Pick(1, w - 2), c2 = Pick(c1 + 1, w - 1);
      boxes.push_back({{r, c}, {r1, c2}});
      boxes.push_back({{r, c + c2}, {r2, w - c2}});
      boxes.push_back({{r + r2, c + c1}, {h - r2, w - c1}});
      boxes.push_back({{r + r1, c}, {h - r1, c1}});
      core = {{r + r1, c + c1}, {r2 - r1, c2 - c1}};
    }
    boxes.push_back(core);
    if (Pick(0, 1)) {
      region.offsets.push_back(0);
      region.sizes.push_back(3);
      for (size_t i = boxes.size(); i-- > 0;) {
        boxes[i].offsets.push_back(0);
        boxes[i].sizes.push_back(3);
        if (Pick(0, 1)) continue;
        const int64_t at = Pick(1, 2);
        boxes.push_back(boxes[i]);
        boxes.back().sizes[2] = boxes[i].offsets[2] = at;
        boxes[i].sizes[2] = 3 - at;
      }
    }
    std::shuffle(boxes.begin(), boxes.end(), rng_);
    ASSERT_TRUE(ProveTiling(region, boxes).ok());
    Box& victim = boxes[static_cast<size_t>(
        Pick(0, static_cast<int64_t>(boxes.size()) - 1))];
    const int d = static_cast<int>(Pick(0, region.rank() - 1));
    switch (Pick(0, 3)) {
      case 0:
        ++victim.sizes[d];
        break;
      case 1:
        --victim.offsets[d];
        ++victim.sizes[d];
        break;
      case 2:
        --victim.sizes[d];
        break;
      default: {  // one cell, anywhere
        Box cell = {region.offsets, Dims::Filled(region.rank(), 1)};
        for (int k = 0; k < region.rank(); ++k) {
          cell.offsets[k] = Pick(0, region.sizes[k] - 1);
        }
        boxes.push_back(cell);
      }
    }
    const Counts truth = Oracle(region, boxes);
    EXPECT_EQ(ProveDisjoint(boxes).ok(), !truth.overlap);
    const ErrorKind tiling = ProveTiling(region, boxes).kind();
    if (tiling == ErrorKind::kInvalidArgument) continue;  // one reaches outside
    EXPECT_EQ(tiling, OfTiling(truth));
  }
}

TEST(FindOverlap, TellsThePositions) {
  const auto pair =
      FindOverlap(Boxes{{{0}, {2}}, {{4}, {0}}, {{5}, {2}}, {{1}, {2}}});
  ASSERT_TRUE(pair.ok());
  ASSERT_TRUE(pair->has_value());
  const auto [a, b] = **pair;
  EXPECT_EQ(std::min(a, b), 0u);
  EXPECT_EQ(std::max(a, b), 3u);
  EXPECT_FALSE(FindOverlap(Boxes{{{0}, {2}}, {{2}, {2}}})->has_value());
  EXPECT_FALSE(FindOverlap(Boxes{})->has_value());
  EXPECT_EQ(FindOverlap(Boxes{{{0}, {2}}, {{0, 0}, {2, 2}}}).status().kind(),
            ErrorKind::kInvalidArgument);
}

TEST(ProveTiling, NamesTheBoxes) {
  const Box region = Box::Whole({4, 6});
  Status status = ProveTiling(region, {{{0, 0}, {2, 6}}, {{2, 0}, {2, 3}}});
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(status.message(), "nothing covers [2:4, 3:6]");
  status = ProveTiling(region,
                       {{{0, 0}, {2, 6}}, {{1, 0}, {3, 3}}, {{2, 3}, {2, 3}}});
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_EQ(status.message(), "box 0 [0:2, 0:6] and box 1 [1:4, 0:3] overlap");
  EXPECT_EQ(ProveTiling(region, {{{0, 0}, {5, 6}}}).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(ProveTiling(region, {{{0}, {4}}}).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(ProveTiling(region, {}).kind(), ErrorKind::kIncomplete);
}

TEST(ProveTiling, ScalarsAndEmptyRegions) {
  const Box scalar;
  EXPECT_TRUE(ProveTiling(scalar, {scalar}).ok());
  EXPECT_EQ(ProveTiling(scalar, {}).kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(ProveTiling(scalar, {scalar, scalar}).kind(), ErrorKind::kConflict);
  EXPECT_EQ(ProveTiling(scalar, Boxes(9, scalar)).kind(), ErrorKind::kConflict);
  const Box empty = Box::Whole({0, 5});
  EXPECT_TRUE(ProveTiling(empty, {}).ok());
  EXPECT_TRUE(ProveTiling(empty, {empty}).ok());
  const int64_t most = int64_t{1} << 48;
  EXPECT_TRUE(ProveTiling(Box::Whole({most, most, 0}), {}).ok());
}

TEST(ProveTiling, PinwheelInterlocks) {
  // No cut leaves all four blades whole.
  const Box region = Box::Whole({3, 3});
  Boxes boxes = {{{0, 0}, {1, 2}},
                 {{0, 2}, {2, 1}},
                 {{2, 1}, {1, 2}},
                 {{1, 0}, {2, 1}},
                 {{1, 1}, {1, 1}}};
  EXPECT_TRUE(ProveTiling(region, boxes).ok());
  boxes.pop_back();
  EXPECT_EQ(ProveTiling(region, boxes).message(), "nothing covers [1:2, 1:2]");
}

TEST(ProveTiling, HugeNumbersDoNotOverflow) {
  const int64_t huge = INT64_MAX - 2;
  EXPECT_FALSE(ProveDisjoint({{{huge}, {huge}}, {{huge + 1}, {1}}}).ok());
  EXPECT_EQ(ProveTiling(Box::Whole({8}), {{{4}, {huge}}}).kind(),
            ErrorKind::kInvalidArgument);
  const Boxes negative = {{{0}, {-8}}, {{9}, {INT64_MIN}}};
  EXPECT_EQ(ProveTiling(Box::Whole({8}), negative).kind(),
            ErrorKind::kIncomplete);
  EXPECT_TRUE(ProveDisjoint(negative).ok());
}

// Boxes of three elements in each dimension, that tile a region as `grid` says.
Boxes GridOf(const Dims& grid) {
  Boxes boxes;
  for (int64_t i = 0; i < grid.Product(); ++i) {
    Box box = {Dims::Filled(grid.size(), 0), Dims::Filled(grid.size(), 3)};
    int64_t rest = i;
    for (int d = grid.size() - 1; d >= 0; --d) {
      box.offsets[d] = 3 * (rest % grid[d]);
      rest /= grid[d];
    }
    boxes.push_back(box);
  }
  return boxes;
}

// The number of boxes that a large job has.
class ManyBoxes : public ::testing::TestWithParam<Dims> {};

TEST_P(ManyBoxes, AreProvedInTheTimeOfThem) {
  const auto prove = [](const Dims& grid) {
    Boxes boxes = GridOf(grid);
    Dims shape;
    for (int64_t n : grid) shape.push_back(3 * n);
    const Box region = Box::Whole(shape);
    EXPECT_TRUE(ProveTiling(region, boxes).ok());
    const Box gone = boxes[boxes.size() / 2];
    boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(boxes.size() / 2));
    EXPECT_EQ(ProveTiling(region, boxes).message(),
              "nothing covers " + gone.ToString());
    boxes.insert(boxes.end(), 2, gone);
    EXPECT_EQ(ProveTiling(region, boxes).kind(), ErrorKind::kConflict);
    boxes.push_back(region);  // on top of everything
    EXPECT_EQ(ProveTiling(region, boxes).kind(), ErrorKind::kConflict);
  };
  prove(GetParam());
  Dims grid = GetParam();
  ExpectLinearTime(
      [&](size_t n) -> Cost {
        grid[0] = static_cast<int64_t>(n);
        prove(grid);
        return {};
      },
      static_cast<size_t>(grid[0]) / 8);
}

TEST(ProveTiling, StaircaseIsNotQuadratic) {
  // Each box but peels one row or column off the rest.
  const auto prove = [](size_t steps) -> Cost {
    const auto n = static_cast<int64_t>(steps);
    Boxes boxes;
    for (int64_t i = 0; i < n; ++i) {
      boxes.push_back({{i, 0, i}, {1, 4, n - i}});
      if (i + 1 < n) boxes.push_back({{i + 1, 0, i}, {n - i - 1, 4, 1}});
    }
    EXPECT_TRUE(ProveTiling(Box::Whole({n, 4, n}), boxes).ok());
    boxes.back().sizes[2] = 2;
    EXPECT_FALSE(ProveTiling(Box::Whole({n, 4, n}), boxes).ok());
    return {};
  };
  prove(50'000);
  ExpectLinearTime(prove, 3000);
}

// Three stacks of plates, each of which reaches past the two others: no slab
// holds fewer than all.
TEST(ProveDisjoint, InterlockingStacksAreNotQuadratic) {
  const auto prove = [](size_t n) -> Cost {
    const auto k = static_cast<int64_t>(n);
    Boxes boxes;
    for (int64_t i = 0; i < k; ++i) {
      boxes.push_back({{0, 0, k + i}, {3 * k, k, 1}});
      boxes.push_back({{k + i, 0, 0}, {1, 3 * k, k}});
      boxes.push_back({{0, k + i, 0}, {k, 1, 3 * k}});
    }
    const size_t bytes = boxes.size() * sizeof(Box);
    Budget budget("the boxes", bytes);
    return {ProveDisjoint(boxes, &budget), budget.steps(), bytes};
  };
  EXPECT_TRUE(prove(500).status.ok());
  ExpectLinear(prove, 3600);
}

INSTANTIATE_TEST_SUITE_P(Grids, ManyBoxes,
                         ::testing::Values(Dims{100'000}, Dims{300, 333},
                                           Dims{46, 46, 47}));

}  // namespace
}  // namespace torch_ckpt
