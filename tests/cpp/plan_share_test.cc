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
                            const std::vector<uint32_t>& chosen) {
  std::vector<uint64_t> load(problem.nodes.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    load[chosen[i]] += problem.boxes[i].bytes;
  }
  return load;
}

TEST(ShareTest, WhoHoldsAloneWrites) {
  ShareProblem problem{Ranks(3), {{0}, {0, 1, 2}}, {}};
  problem.boxes = {{1, 0, false, 10}, {1, 1, false, 10}, {0, 2, false, 100}};
  const auto chosen = ShareOut(problem);
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(*chosen, (std::vector<uint32_t>{1, 2, 0}));
}

TEST(ShareTest, LargestFirst) {
  // In their order the large one would come last, and onto a full rank.
  ShareProblem problem{Ranks(2), {{0, 1}}, {}};
  for (const uint64_t bytes : {3, 3, 3, 3, 12}) {
    problem.boxes.push_back({0, 0, false, bytes});
  }
  const auto chosen = ShareOut(problem);
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(Loads(problem, *chosen), (std::vector<uint64_t>{12, 12}));
}

TEST(ShareTest, StaysOnANode) {
  ShareProblem problem{{0, 0, 1, 1}, {{0, 1, 2, 3}}, {}};
  for (uint32_t i = 0; i < 8; ++i) {
    problem.boxes.push_back({0, i / 4, true, 100});
  }
  const auto chosen = ShareOut(problem);
  ASSERT_TRUE(chosen.ok());
  for (uint32_t tensor = 0; tensor < 2; ++tensor) {
    std::set<uint32_t> nodes;
    for (uint32_t i = 0; i < 4; ++i) {
      nodes.insert(problem.nodes[(*chosen)[4 * tensor + i]]);
    }
    EXPECT_EQ(nodes.size(), 1u);
  }
  EXPECT_EQ(Loads(problem, *chosen),
            (std::vector<uint64_t>{200, 200, 200, 200}));
}

TEST(ShareTest, RefusesWhatThereIsNot) {
  EXPECT_FALSE(ShareOut({Ranks(1), {{}}, {}}).ok());
  EXPECT_FALSE(ShareOut({Ranks(1), {{1}}, {}}).ok());
  EXPECT_FALSE(ShareOut({Ranks(1), {{0}}, {{1, 0, false, 1}}}).ok());
  EXPECT_TRUE(ShareOut({Ranks(1), {}, {}}).ok());
}

// Over random problems: a holder writes each, and no rank has more than the
// lower bound by more than the largest box.
TEST(ShareTest, IsBalanced) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const auto world = static_cast<uint32_t>(1 + random() % 16);
    const auto replicas = static_cast<uint32_t>(1 + random() % world);
    ShareProblem problem{Ranks(world), {}, {}};
    for (uint32_t first = 0; first < world; first += replicas) {
      std::vector<uint32_t> set;
      for (uint32_t i = first; i < std::min(world, first + replicas); ++i) {
        set.push_back(i);
      }
      problem.sets.push_back(set);
    }
    const auto count = static_cast<uint32_t>(problem.sets.size());
    std::vector<uint64_t> total(count), largest(count);
    for (int i = 0; i < 200; ++i) {
      const auto set = static_cast<uint32_t>(random() % count);
      const uint64_t bytes = 1 + random() % 1000;
      problem.boxes.push_back({set, 0, false, bytes});
      total[set] += bytes;
      largest[set] = std::max(largest[set], bytes);
    }
    const auto chosen = ShareOut(problem);
    ASSERT_TRUE(chosen.ok());
    const std::vector<uint64_t> load = Loads(problem, *chosen);
    for (uint32_t set = 0; set < count; ++set) {
      const std::vector<uint32_t>& holders = problem.sets[set];
      for (const uint32_t rank : holders) {
        EXPECT_LE(load[rank], total[set] / holders.size() + largest[set]);
      }
    }
    for (size_t i = 0; i < chosen->size(); ++i) {
      const auto& holders = problem.sets[problem.boxes[i].holders];
      EXPECT_TRUE(
          std::binary_search(holders.begin(), holders.end(), (*chosen)[i]));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
