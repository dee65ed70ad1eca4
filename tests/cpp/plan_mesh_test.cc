// The expected boxes are what torch's own Shard and _StridedShard split an
// arange into.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "budget_test_util.h"
#include "plan/cover.h"
#include "plan/mesh.h"

namespace torch_ckpt {
namespace {

MeshPlacement Replicate() { return {}; }
MeshPlacement Shard(int dim) { return {MeshPlacementKind::kShard, dim, 1}; }
MeshPlacement Strided(int dim, int64_t split_factor) {
  return {MeshPlacementKind::kStridedShard, dim, split_factor};
}

// The shape of a tensor that these boxes tile.
Dims Hull(const std::vector<Box>& boxes) {
  Dims shape;
  for (const Box& box : boxes) {
    if (shape.empty()) shape = Dims::Filled(box.rank(), 0);
    for (int d = 0; d < box.rank(); ++d) {
      shape[d] = std::max(shape[d], box.offsets[d] + box.sizes[d]);
    }
  }
  return shape;
}

// "<box>@<local offset> ...", or the kind of the error.
std::string Expand(const Dims& shape, const MeshRule& rule,
                   const Dims& coordinate) {
  Budget budget("the rule", 0);
  const Result<std::vector<LocalBox>> boxes =
      ExpandRule(shape, rule, coordinate, &budget);
  if (!boxes.ok()) return ErrorKindName(boxes.status().kind());
  std::string text;
  for (const LocalBox& box : *boxes) {
    if (!text.empty()) text += " ";
    text += box.box.ToString() + "@" + box.local_offset.ToString();
  }
  return text;
}

TEST(ExpandRule, ShardSplitsLikeChunk) {
  const MeshRule rule = {{4}, {Shard(0)}};
  EXPECT_EQ(Expand({10}, rule, {0}), "[0:3]@(0)");
  EXPECT_EQ(Expand({10}, rule, {2}), "[6:9]@(0)");
  EXPECT_EQ(Expand({10}, rule, {3}), "[9:10]@(0)");
  EXPECT_EQ(Expand({5}, rule, {2}), "[4:5]@(0)");
  EXPECT_EQ(Expand({5}, rule, {3}), "");
  EXPECT_EQ(Expand({5, 7}, rule, {3}), "");
  EXPECT_EQ(Expand({0}, rule, {0}), "");
  EXPECT_EQ(Expand({6, 0}, rule, {0}), "");
}

TEST(ExpandRule, MeshDimensionsNestFromLeftToRight) {
  const MeshRule twice = {{2, 2}, {Shard(0), Shard(0)}};
  EXPECT_EQ(Expand({10, 3}, twice, {0, 0}), "[0:3, 0:3]@(0, 0)");
  EXPECT_EQ(Expand({10, 3}, twice, {0, 1}), "[3:5, 0:3]@(0, 0)");
  EXPECT_EQ(Expand({10, 3}, twice, {1, 0}), "[5:8, 0:3]@(0, 0)");
  EXPECT_EQ(Expand({10, 3}, twice, {1, 1}), "[8:10, 0:3]@(0, 0)");
  const MeshRule crossed = {{2, 3}, {Shard(1), Shard(0)}};
  EXPECT_EQ(Expand({5, 7}, crossed, {0, 2}), "[4:5, 0:4]@(0, 0)");
  EXPECT_EQ(Expand({5, 7}, crossed, {1, 1}), "[2:4, 4:7]@(0, 0)");
}

TEST(ExpandRule, FullyShardedAfterTensorParallelIsOneBox) {
  const MeshRule rule = {{2, 2}, {Strided(0, 2), Shard(0)}};
  EXPECT_EQ(Expand({8, 2}, rule, {0, 0}), "[0:2, 0:2]@(0, 0)");
  EXPECT_EQ(Expand({8, 2}, rule, {0, 1}), "[4:6, 0:2]@(0, 0)");
  EXPECT_EQ(Expand({8, 2}, rule, {1, 0}), "[2:4, 0:2]@(0, 0)");
  EXPECT_EQ(Expand({8, 2}, rule, {1, 1}), "[6:8, 0:2]@(0, 0)");
  EXPECT_EQ(Expand({7, 2}, rule, {1, 0}), "[2:4, 0:2]@(0, 0)");
  EXPECT_EQ(Expand({7, 2}, rule, {1, 1}), "[6:7, 0:2]@(0, 0)");
}

TEST(ExpandRule, LoneStridedShardIsSeveralBoxes) {
  const MeshRule rule = {{4}, {Strided(0, 2)}};
  EXPECT_EQ(Expand({9}, rule, {0}), "[0:2]@(0) [5:6]@(2)");
  EXPECT_EQ(Expand({9}, rule, {1}), "[2:4]@(0) [6:7]@(2)");
  EXPECT_EQ(Expand({9}, rule, {2}), "[4:5]@(0) [7:8]@(1)");
  EXPECT_EQ(Expand({9}, rule, {3}), "[8:9]@(0)");
  EXPECT_EQ(Expand({11}, {{2, 2}, {Replicate(), Strided(0, 3)}}, {1, 1}),
            "[2:4]@(0) [6:8]@(2) [10:11]@(4)");
  EXPECT_EQ(Expand({8}, {{1}, {Strided(0, 4)}}, {0}), "[0:8]@(0)")
      << "adjacent boxes are merged";
}

TEST(ExpandRule, StridedShardsOfTwoDimensionsMultiply) {
  const MeshRule rule = {{2, 2}, {Strided(0, 2), Strided(1, 3)}};
  EXPECT_EQ(Expand({8, 6}, rule, {0, 1}),
            "[0:2, 1:2]@(0, 0) [0:2, 3:4]@(0, 1) [0:2, 5:6]@(0, 2) "
            "[4:6, 1:2]@(2, 0) [4:6, 3:4]@(2, 1) [4:6, 5:6]@(2, 2)");
}

TEST(ExpandRule, UnevenThreeDimensionalMesh) {
  const MeshRule rule = {{2, 2, 2}, {Strided(0, 4), Strided(0, 2), Shard(0)}};
  EXPECT_EQ(Expand({13}, rule, {0, 0, 1}), "[8:10]@(0)");
  EXPECT_EQ(Expand({13}, rule, {0, 1, 1}), "[12:13]@(0)");
  EXPECT_EQ(Expand({13}, rule, {1, 0, 0}), "[2:4]@(0)");
  EXPECT_EQ(Expand({13}, rule, {1, 0, 1}), "[7:8]@(0) [10:11]@(1)");
}

TEST(ExpandRule, ScalarsReplicate) {
  EXPECT_EQ(Expand({}, {{2}, {Replicate()}}, {1}), "[]@()");
  EXPECT_EQ(Expand({}, {{}, {}}, {}), "[]@()");
  EXPECT_EQ(Expand({}, {{2}, {Shard(0)}}, {1}), "invalid_argument");
}

TEST(ExpandRule, RefusesWhatTorchRefuses) {
  const std::string kInvalid = "invalid_argument";
  EXPECT_EQ(Expand({4}, {{2}, {Shard(1)}}, {0}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2}, {Shard(-1)}}, {0}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2}, {Strided(0, 0)}}, {0}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2, 2}, {Shard(0)}}, {0, 0}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2}, {Shard(0)}}, {2}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2}, {Shard(0)}}, {-1}), kInvalid);
  EXPECT_EQ(Expand({4}, {{2}, {Shard(0)}}, {0, 0}), kInvalid);
  EXPECT_EQ(Expand({4}, {{0}, {Shard(0)}}, {0}), kInvalid);
  EXPECT_EQ(Expand({-4}, {{2}, {Shard(0)}}, {0}), kInvalid);
}

TEST(ExpandRule, HostileRuleIsBounded) {
  const int64_t most = (int64_t{1} << 48) - 1;
  EXPECT_EQ(Expand({most}, {{2}, {Strided(0, most / 2)}}, {0}), "exhausted");
  EXPECT_EQ(Expand({2}, {{most}, {Strided(0, INT64_MAX)}}, {0}), "[0:2]@(0)");
  EXPECT_EQ(Expand({most}, {{INT64_MAX}, {Shard(0)}}, {INT64_MAX - 1}), "");
  EXPECT_EQ(Expand({4096, 4096}, {{2, 2}, {Strided(0, 2048), Strided(1, 2048)}},
                   {0, 0}),
            "exhausted");
}

// No box is made of an empty tensor, and each piece is looked at.
TEST(ExpandRule, PiecesOfEmptyTensorsCount) {
  const int64_t pieces = 65'536;
  const auto expand = [&](size_t leaves) -> Cost {
    const size_t bytes = 14 * leaves;
    Budget budget("the pickle", bytes);
    for (size_t i = 0; i < leaves; ++i) {
      const auto boxes = ExpandRule({0, 4 * pieces},
                                    {{2}, {Strided(1, pieces)}}, {0}, &budget);
      if (!boxes.ok()) return {boxes.status(), budget.steps(), bytes};
    }
    return {{}, budget.steps(), bytes};
  };
  ExpectLinear(expand, 50);
  EXPECT_EQ(expand(2000).status.kind(), ErrorKind::kExhausted);
}

TEST(ExpandRule, RanksTileTheTensor) {
  std::mt19937_64 rng(5);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  for (int round = 0; round < 1000; ++round) {
    Dims shape;
    for (int64_t d = pick(1, 3); d > 0; --d) shape.push_back(pick(0, 13));
    MeshRule rule;
    for (int64_t m = pick(1, 3); m > 0; --m) {
      rule.mesh.push_back(pick(1, 4));
      const int dim = static_cast<int>(pick(0, shape.size() - 1));
      rule.placements.push_back(pick(0, 1) ? Shard(dim)
                                           : Strided(dim, pick(1, 5)));
    }
    std::vector<Box> all;
    for (int64_t rank = 0; rank < rule.mesh.Product(); ++rank) {
      Dims coordinate = rule.mesh;
      int64_t rest = rank;
      for (int m = rule.mesh.size() - 1; m >= 0; --m) {
        coordinate[m] = rest % rule.mesh[m];
        rest /= rule.mesh[m];
      }
      std::vector<Box> local;
      Budget budget("the rule", 0);
      const auto boxes = ExpandRule(shape, rule, coordinate, &budget);
      ASSERT_TRUE(boxes.ok());
      for (const LocalBox& box : *boxes) {
        all.push_back(box.box);
        local.push_back({box.local_offset, box.box.sizes});
      }
      if (local.empty()) continue;
      ASSERT_TRUE(ProveTiling(Box::Whole(Hull(local)), local).ok());
    }
    ASSERT_TRUE(ProveTiling(Box::Whole(shape), all).ok()) << round;
  }
}

}  // namespace
}  // namespace torch_ckpt
