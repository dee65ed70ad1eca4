#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "plan/share.h"

namespace torch_ckpt {
namespace {

std::vector<uint32_t> Ranks(uint32_t count) {
  std::vector<uint32_t> out(count);
  std::iota(out.begin(), out.end(), 0u);
  return out;
}

std::vector<uint64_t> Loads(const ShareProblem& problem,
                            const std::vector<BoxShare>& pieces) {
  std::vector<uint64_t> load(problem.nodes.size());
  for (const BoxShare& piece : pieces) {
    load[piece.rank] +=
        (piece.end - piece.begin) * problem.boxes[piece.box].row_bytes;
  }
  return load;
}

TEST(ShareTest, WhoHoldsAloneWrites) {
  ShareProblem problem{Ranks(3), {{0}, {0, 1, 2}}, {}};
  problem.boxes = {
      {1, 0, false, 1, 10}, {1, 1, false, 1, 10}, {0, 2, false, 1, 100}};
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  ASSERT_EQ(pieces->size(), 3u);
  EXPECT_EQ((*pieces)[0].rank, 1u);
  EXPECT_EQ((*pieces)[1].rank, 2u);
  EXPECT_EQ((*pieces)[2].rank, 0u);
}

TEST(ShareTest, LargestFirst) {
  // In their order the large one would come last, and onto a full rank.
  ShareProblem problem{Ranks(2), {{0, 1}}, {}};
  for (const uint64_t bytes : {3, 3, 3, 3, 12}) {
    problem.boxes.push_back({0, 0, false, 1, bytes});
  }
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  EXPECT_EQ(Loads(problem, *pieces), (std::vector<uint64_t>{12, 12}));
}

TEST(ShareTest, StaysOnANode) {
  ShareProblem problem{{0, 0, 1, 1}, {{0, 1, 2, 3}}, {}};
  for (uint32_t i = 0; i < 8; ++i) {
    problem.boxes.push_back({0, i / 4, true, 1, 100});
  }
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  for (uint32_t tensor = 0; tensor < 2; ++tensor) {
    std::set<uint32_t> nodes;
    for (const BoxShare& piece : *pieces) {
      if (piece.box / 4 == tensor) nodes.insert(problem.nodes[piece.rank]);
    }
    EXPECT_EQ(nodes.size(), 1u);
  }
  EXPECT_EQ(Loads(problem, *pieces),
            (std::vector<uint64_t>{200, 200, 200, 200}));
}

TEST(ShareTest, RefusesWhatThereIsNot) {
  EXPECT_FALSE(ShareOut({Ranks(1), {{}}, {}}).ok());
  EXPECT_FALSE(ShareOut({Ranks(1), {{1}}, {}}).ok());
  EXPECT_FALSE(ShareOut({Ranks(1), {{0}}, {{1, 0, false, 1, 1}}}).ok());
  EXPECT_FALSE(ShareOut({Ranks(1), {{0}}, {{0, 0, false, 0, 1}}}).ok());
  EXPECT_TRUE(ShareOut({Ranks(1), {}, {}}).ok());
}

constexpr uint64_t kMiB = 1 << 20;

TEST(ShareTest, CutsOnlyWhatIsAboveAShare) {
  ShareProblem problem{Ranks(4), {{0, 1, 2, 3}}, {}};
  problem.boxes = {{0, 0, false, 1000, kMiB / 10},
                   {0, 1, false, 100, kMiB / 10},
                   {0, 2, false, 100, kMiB / 10}};
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  // A share is 30 MiB: the first box goes in three pieces of that and the rest.
  ASSERT_EQ(pieces->size(), 6u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*pieces)[i].end - (*pieces)[i].begin, 300u);
  }
  EXPECT_EQ((*pieces)[3].end, 1000u);
  for (const uint64_t load : Loads(problem, *pieces)) {
    EXPECT_EQ(load, 300 * (kMiB / 10));
  }
}

TEST(ShareTest, CutsNothingSmall) {
  ShareProblem problem{Ranks(4), {{0, 1, 2, 3}}, {}};
  problem.boxes = {{0, 0, false, 1000, 1000}};
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  ASSERT_EQ(pieces->size(), 1u);
  EXPECT_EQ((*pieces)[0].end, 1000u);
}

TEST(ShareTest, ABoxOfFewLargeRows) {
  ShareProblem problem{Ranks(4), {{0, 1, 2, 3}}, {}};
  problem.boxes = {{0, 0, false, 6, 100 * kMiB}};
  const auto pieces = ShareOut(problem);
  ASSERT_TRUE(pieces.ok());
  std::vector<uint64_t> load = Loads(problem, *pieces);
  std::sort(load.begin(), load.end());
  EXPECT_EQ(load.back(), 200 * kMiB);
  EXPECT_EQ(load.front(), 100 * kMiB);
}

// Over random problems: each row of each box is written once, by a holder, and
// no rank of equal holders has much more than an equal share of what they have,
// or than what it has alone.
TEST(ShareTest, IsBalanced) {
  std::mt19937 random(7);
  const auto upto = [&](uint64_t most) { return 1 + random() % most; };
  for (int round = 0; round < 300; ++round) {
    const auto world = static_cast<uint32_t>(upto(16));
    const auto replicas = static_cast<uint32_t>(upto(world));
    ShareProblem problem{Ranks(world), {}, {}};
    std::vector<uint64_t> due;  // by rank
    for (uint32_t first = 0; first < world; first += replicas) {
      std::vector<uint32_t> set;
      for (uint32_t i = first; i < std::min(world, first + replicas); ++i) {
        set.push_back(i);
      }
      uint64_t total = 0, largest = 0;
      for (uint64_t i = upto(60); i > 0; --i) {
        const SharedBox box{static_cast<uint32_t>(problem.sets.size()),
                            static_cast<uint32_t>(i), false, upto(4000),
                            random() % 5 ? upto(9000) : 0};
        problem.boxes.push_back(box);
        total += box.rows * box.row_bytes;
        largest = std::max(largest, box.row_bytes);
      }
      const uint64_t share = total / set.size() + 1;
      due.insert(due.end(), set.size(),
                 share + std::max(kMiB, share / 64) + largest);
      problem.sets.push_back(set);
    }
    const auto pieces = ShareOut(problem);
    ASSERT_TRUE(pieces.ok());
    size_t at = 0;
    for (uint32_t box = 0; box < problem.boxes.size(); ++box) {
      uint64_t row = 0;
      for (; at < pieces->size() && (*pieces)[at].box == box; ++at) {
        const BoxShare& piece = (*pieces)[at];
        const auto& holders = problem.sets[problem.boxes[box].holders];
        EXPECT_TRUE(
            std::binary_search(holders.begin(), holders.end(), piece.rank));
        EXPECT_EQ(piece.begin, row);
        EXPECT_LT(piece.begin, piece.end);
        row = piece.end;
      }
      EXPECT_EQ(row, problem.boxes[box].rows);
    }
    EXPECT_EQ(at, pieces->size());
    const std::vector<uint64_t> load = Loads(problem, *pieces);
    for (uint32_t rank = 0; rank < world; ++rank) {
      EXPECT_LE(load[rank], due[rank]);
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
