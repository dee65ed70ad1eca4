// Jobs over values against the kernels on whole tensors in memory.
#include <cmath>
#include <filesystem>

#include "engine/read/value_jobs.h"
#include "engine_test_util.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

class ValueJobsTest : public EngineDiskTest {
 protected:
  Result<std::vector<Difference>> Compare(const std::vector<std::string>& names,
                                          const StreamOptions& options,
                                          const Tolerances& tolerances = {}) {
    TC_ASSIGN_OR_RETURN(const CheckpointPtr a, OpenCheckpoint(Path("a")));
    TC_ASSIGN_OR_RETURN(const CheckpointPtr b, OpenCheckpoint(Path("b")));
    return RunCompareJob(a, b, names, tolerances, options, &job_);
  }
  Result<TensorStatistics> StatisticsIn(const std::string& name,
                                        const StreamOptions& options) {
    TC_ASSIGN_OR_RETURN(const CheckpointPtr a, OpenCheckpoint(Path("a")));
    return RunStatisticsJob(a, name, options, &job_);
  }
  Job job_;
};

Difference Whole(const Array& a, const Array& b) {
  return CompareElements(a.dtype, AsBytes(a.bytes).data(), b.dtype,
                         AsBytes(b.bytes).data(),
                         static_cast<size_t>(a.shape.Product()), {});
}

// The least memory that one worker takes: 2 MiB are left for tensors.
StreamOptions Little() {
  StreamOptions options;
  options.workers = 1;
  options.memory = uint64_t{8} << 20;
  return options;
}

TEST_F(ValueJobsTest, PiecesOfOtherShardingsAddUpToTheWhole) {
  const std::vector<std::pair<Dtype, Dims>> kinds = {
      {Dtype::kF32, {1000, 700}},
      {Dtype::kBF16, {3, 400000}},
      {Dtype::kI64, {1, 1, 300000}},
      {Dtype::kF4, {6, 500000}},
      {Dtype::kF6E2M3, {1200000}},
      {Dtype::kF4, {2, 3}},
      {Dtype::kF64, {}},
      {Dtype::kU8, {0, 7}},
      {Dtype::kC64, {250, 300}},
      {Dtype::kBool, {2, 2, 2, 2, 2}}};
  std::vector<Array> left, right;
  for (const auto& [dtype, shape] : kinds) {
    left.push_back(MakeArray(dtype, shape, 1));
    right.push_back(left.back());
    std::string& bytes = right.back().bytes;
    for (size_t at = 5; at < bytes.size(); at += 1 + bytes.size() / 7) {
      bytes[at] = static_cast<char>(bytes[at] ^ 0x11);
    }
  }
  std::vector<Piece> a, b;
  std::vector<std::string> names;
  for (size_t i = 0; i < kinds.size(); ++i) {
    names.push_back("t" + std::to_string(i));
    a.push_back(WholePiece(names[i], left[i]));
    if (i > 4) b.push_back(WholePiece(names[i], right[i], 1));
  }
  for (Piece& p : GridPieces("t0", right[0], {3, 2})) b.push_back(p);
  for (Piece& p : GridPieces("t1", right[1], {1, 4})) b.push_back(p);
  for (Piece& p : GridPieces("t2", right[2], {1, 1, 3})) b.push_back(p);
  for (Piece& p : GridPieces("t3", right[3], {5, 1})) b.push_back(p);
  for (Piece& p : GridPieces("t4", right[4], {4})) b.push_back(p);
  ASSERT_OK(SaveAll(Path("a"), a).status());
  ASSERT_OK(SaveAll(Path("b"), b).status());
  StreamOptions roomy;
  roomy.workers = 4;
  for (const StreamOptions& options : {Little(), roomy}) {
    const auto found = Compare(names, options);
    ASSERT_OK(found.status());
    ASSERT_EQ(found->size(), names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const Difference whole = Whole(left[i], right[i]);
      EXPECT_EQ((*found)[i].count, whole.count) << names[i];
      EXPECT_EQ(whole.count > 0,
                !right[i].bytes.empty() && right[i].bytes != left[i].bytes);
      EXPECT_TRUE(
          (*found)[i].largest == whole.largest ||
          (std::isnan((*found)[i].largest) && std::isnan(whole.largest)))
          << names[i];
      const auto statistics = StatisticsIn(names[i], options);
      ASSERT_OK(statistics.status());
      EXPECT_EQ(statistics->dtype, kinds[i].first);
      const Statistics& values = statistics->values;
      if (NumberKindOf(kinds[i].first) == NumberKind::kNone) continue;
      // A complex element may have a part of each kind.
      EXPECT_GE(values.finite + values.nan + values.infinite,
                static_cast<uint64_t>(left[i].shape.Product()))
          << names[i];
    }
  }
}

TEST_F(ValueJobsTest, OutcomeDoesNotDependOnThreadsOrMemory) {
  const Array a = MakeArray(Dtype::kF16, {1500, 1001}, 3);
  ASSERT_OK(SaveAll(Path("a"), GridPieces("x", a, {2, 2})).status());
  StreamOptions several;
  several.workers = 4;
  const auto first = StatisticsIn("x", several);
  ASSERT_OK(first.status());
  for (int i = 0; i < 3; ++i) {
    const auto again = StatisticsIn("x", several);
    ASSERT_OK(again.status());
    EXPECT_EQ(again->values.sum, first->values.sum);
  }
  const auto little = StatisticsIn("x", Little());
  ASSERT_OK(little.status());
  EXPECT_EQ(little->values.nan, first->values.nan);
  EXPECT_EQ(little->values.least, first->values.least);
  EXPECT_EQ(little->values.largest, first->values.largest);
}

TEST_F(ValueJobsTest, Errors) {
  const Array a = MakeArray(Dtype::kF32, {400, 400}, 1);
  const Array b = MakeArray(Dtype::kF32, {160000}, 1);
  ASSERT_OK(
      SaveAll(Path("a"), {WholePiece("x", a), WholePiece("y", a)}).status());
  ASSERT_OK(SaveAll(Path("b"), {WholePiece("x", b)}).status());
  const auto kind = [&](const std::string& name, const StreamOptions& options) {
    const Status status = Compare({name}, options).status();
    EXPECT_TRUE(name.empty() || status.tensor() == name || !options.memory);
    return status.kind();
  };
  EXPECT_EQ(kind("x", {}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind("y", {}), ErrorKind::kIncomplete);
  EXPECT_EQ(kind("z", {}), ErrorKind::kIncomplete);
  StreamOptions none;
  none.memory = 0;
  EXPECT_EQ(StatisticsIn("x", none).status().kind(), ErrorKind::kExhausted);
  job_.Cancel();
  EXPECT_EQ(StatisticsIn("x", {}).status().kind(), ErrorKind::kCancelled);
}

// An odd tensor of packed elements cannot be cut.
TEST_F(ValueJobsTest, WhatCannotBeCutMustFit) {
  const Array odd = MakeArray(Dtype::kF4, {1000002, 5}, 1);  // 2.5 MB
  ASSERT_OK(SaveAll(Path("a"), {WholePiece("odd", odd)}).status());
  ASSERT_OK(SaveAll(Path("b"), {WholePiece("odd", odd)}).status());
  const Status status = Compare({"odd"}, Little()).status();
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(status.tensor(), "odd");
  ASSERT_OK(Compare({"odd"}, {}).status());
}

TEST_F(ValueJobsTest, DamageIsFoundWhereThereAreDigests) {
  const Array a = MakeArray(Dtype::kF32, {700, 1000}, 1);
  ASSERT_OK(SaveAll(Path("a"), {WholePiece("x", a)}).status());
  for (const std::string& name : Names(Path("a"))) {
    if (!name.ends_with(".safetensors")) continue;
    std::string bytes = ReadText(Path("a/" + name));
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    WriteText(Path("a/" + name), bytes);
  }
  EXPECT_EQ(StatisticsIn("x", {}).status().kind(), ErrorKind::kCorrupt);
  StreamOptions blind;
  blind.verify = false;
  EXPECT_OK(StatisticsIn("x", blind).status());
}

}  // namespace
}  // namespace torch_ckpt
