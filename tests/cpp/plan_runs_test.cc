#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "plan/copy_run.h"
#include "plan/runs.h"

namespace torch_ckpt {
namespace {

StridedBox Dense(const Box& box, int64_t unit, uint64_t base = 0) {
  return {box, base, DenseStrides(box.sizes, unit)};
}

TEST(Intersect, HalvesAndMisses) {
  EXPECT_EQ(Intersect({{0, 0}, {4, 4}}, {{2, 3}, {4, 4}}),
            (Box{{2, 3}, {2, 1}}));
  EXPECT_EQ(Intersect({{0, 0}, {4, 4}}, {{4, 0}, {1, 4}}).Volume(), 0);
  EXPECT_EQ(Intersect({{}, {}}, {{}, {}}).Volume(), 1);
  const int64_t huge = INT64_MAX - 1;
  EXPECT_EQ(Intersect({{huge}, {huge}}, {{0}, {huge}}).Volume(), 0);
}

TEST(MakeRun, WholeTensorIsOneCopy) {
  const Box box = Box::Whole({3, 5, 7});
  torch_ckpt::Run run;
  ASSERT_TRUE(MakeRun(Dense(box, 2, 100), Dense(box, 2, 7), 2, &run));
  EXPECT_EQ(run.loops, 0);
  EXPECT_EQ(run.bytes, 210u);
  EXPECT_EQ(run.src, 100u);
  EXPECT_EQ(run.dst, 7u);
}

TEST(MakeRun, RowShardIsOneCopyAndColumnShardOneLoop) {
  const StridedBox whole = Dense(Box::Whole({8, 6, 4}), 4);
  torch_ckpt::Run run;
  ASSERT_TRUE(MakeRun(Dense({{2, 0, 0}, {3, 6, 4}}, 4), whole, 4, &run));
  EXPECT_EQ(run.loops, 0);
  EXPECT_EQ(run.bytes, 3u * 6 * 4 * 4);
  EXPECT_EQ(run.dst, 2u * 6 * 4 * 4);

  ASSERT_TRUE(MakeRun(Dense({{0, 2, 0}, {8, 3, 4}}, 4), whole, 4, &run));
  EXPECT_EQ(run.loops, 1);
  EXPECT_EQ(run.count[0], 8);
  EXPECT_EQ(run.bytes, 3u * 4 * 4);
  EXPECT_EQ(run.src_stride[0], 48);
  EXPECT_EQ(run.dst_stride[0], 96);

  ASSERT_TRUE(MakeRun(Dense({{0, 0, 1}, {8, 6, 2}}, 4), whole, 4, &run));
  EXPECT_EQ(run.loops, 1) << "the two outer dimensions fold on both sides";
  EXPECT_EQ(run.count[0], 48);
}

TEST(MakeRun, ScalarAndEmpty) {
  torch_ckpt::Run run;
  ASSERT_TRUE(MakeRun({{{}, {}}, 5, {}}, {{{}, {}}, 9, {}}, 8, &run));
  EXPECT_EQ(run.bytes, 8u);
  EXPECT_EQ(run.loops, 0);
  EXPECT_FALSE(MakeRun(Dense({{0}, {4}}, 1), Dense({{4}, {4}}, 1), 1, &run));
  EXPECT_FALSE(
      MakeRun(Dense({{0, 0}, {4, 0}}, 1), Dense({{0, 0}, {4, 4}}, 1), 1, &run));
}

TEST(MakeRun, TransposedSourceIsReadAscending) {
  const Box box = Box::Whole({3, 5});
  const StridedBox src = {box, 0, {2, 6}};  // column-major
  torch_ckpt::Run run;
  ASSERT_TRUE(MakeRun(src, Dense(box, 2), 2, &run));
  ASSERT_EQ(run.loops, 2);
  EXPECT_EQ(run.src_stride[0], 6);
  EXPECT_EQ(run.src_stride[1], 2);
  EXPECT_EQ(run.dst_stride[1], 10);
  EXPECT_EQ(run.SrcSpan(), 30u);
}

TEST(MakeRun, ExpandedSourceKeepsLongCopies) {
  const Box box = Box::Whole({3, 5});
  torch_ckpt::Run run;
  ASSERT_TRUE(MakeRun({box, 0, {0, 2}}, Dense(box, 2), 2, &run));
  EXPECT_EQ(run.loops, 1);
  EXPECT_EQ(run.bytes, 10u);
  EXPECT_EQ(run.SrcSpan(), 10u);
}

// (torch_ckpt::Run is spelled out in tests: testing::Test has a Run, too.)

// Random cases against a copy of element after element.
class RandomRuns : public ::testing::Test {
 protected:
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }

  // Strides of a tensor that is dense up to a permutation and some gaps.
  Dims Strides(const Dims& sizes, int64_t unit) {
    std::vector<int> order(static_cast<size_t>(sizes.size()));
    std::iota(order.begin(), order.end(), 0);
    if (Pick(0, 1)) std::shuffle(order.begin(), order.end(), rng_);
    Dims strides = Dims::Filled(sizes.size(), 0);
    int64_t stride = unit;
    for (size_t i = order.size(); i-- > 0;) {
      if (Pick(0, 3) == 0) stride += unit * Pick(1, 3);
      strides[order[i]] = stride;
      stride *= std::max<int64_t>(sizes[order[i]], 1);
    }
    return strides;
  }

  StridedBox RandomBox(int rank, int64_t longest, int64_t unit) {
    StridedBox b;
    b.box = {Dims::Filled(rank, 0), Dims::Filled(rank, 0)};
    for (int d = 0; d < rank; ++d) {
      b.box.offsets[d] = Pick(0, 3);
      b.box.sizes[d] = Pick(1, longest);
    }
    b.base = static_cast<uint64_t>(Pick(0, 9));
    b.strides = Strides(b.box.sizes, unit);
    return b;
  }

  static size_t Bytes(const StridedBox& b, int64_t unit) {
    uint64_t n = b.base + static_cast<uint64_t>(unit);
    for (int d = 0; d < b.box.rank(); ++d) {
      n += static_cast<uint64_t>((b.box.sizes[d] - 1) * b.strides[d]);
    }
    return static_cast<size_t>(n);
  }

  static uint64_t At(const StridedBox& b, const Dims& index) {
    uint64_t at = b.base;
    for (int d = 0; d < b.box.rank(); ++d) {
      at += static_cast<uint64_t>((index[d] - b.box.offsets[d]) * b.strides[d]);
    }
    return at;
  }

  // Copies the overlap unit by unit; returns how many bytes that were.
  static uint64_t Oracle(const StridedBox& src, const StridedBox& dst,
                         int64_t unit, const std::vector<std::byte>& from,
                         std::vector<std::byte>* to) {
    const Box both = Intersect(src.box, dst.box);
    if (both.Empty()) return 0;
    Dims index = both.offsets;
    uint64_t bytes = 0;
    while (true) {
      std::copy_n(from.data() + At(src, index), unit,
                  to->data() + At(dst, index));
      bytes += static_cast<uint64_t>(unit);
      int d = both.rank() - 1;
      for (; d >= 0; --d) {
        if (++index[d] < both.offsets[d] + both.sizes[d]) break;
        index[d] = both.offsets[d];
      }
      if (d < 0) return bytes;
    }
  }

  std::mt19937_64 rng_{20240607};
};

TEST_F(RandomRuns, CopyAndSplitAgreeWithElements) {
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE(round);
    const int rank = static_cast<int>(Pick(0, 4));
    const int64_t unit = std::vector<int64_t>{
        1, 2, 3, 4, 8, 16}[static_cast<size_t>(Pick(0, 5))];
    const int64_t longest = rank <= 2 ? 80 : 7;
    StridedBox src = RandomBox(rank, longest, unit);
    const StridedBox dst = RandomBox(rank, longest, unit);
    if (rank > 0 && Pick(0, 9) == 0) {
      src.strides[static_cast<int>(Pick(0, rank - 1))] = 0;
    }
    std::vector<std::byte> from(Bytes(src, unit));
    for (std::byte& b : from) b = static_cast<std::byte>(Pick(1, 255));
    std::vector<std::byte> expected(Bytes(dst, unit)), whole = expected,
                                                       split = expected;
    const uint64_t bytes = Oracle(src, dst, unit, from, &expected);

    torch_ckpt::Run run;
    ASSERT_EQ(MakeRun(src, dst, unit, &run), bytes > 0);
    if (bytes == 0) continue;
    EXPECT_EQ(run.TotalBytes(), bytes);
    for (size_t l = 0; l < static_cast<size_t>(run.loops); ++l) {
      EXPECT_GT(run.count[l], 1);
    }
    CopyRun(run, from.data(), 0, whole.data(), 0);
    EXPECT_EQ(whole, expected);

    const uint64_t max_span =
        static_cast<uint64_t>(Pick(1, static_cast<int64_t>(from.size()) + 9));
    uint64_t split_bytes = 0, last_src = 0, pieces = 0;
    SplitBySrcSpan(run, max_span, [&](const torch_ckpt::Run& piece) {
      EXPECT_LE(piece.SrcSpan(), max_span);
      EXPECT_GE(piece.src, last_src);
      last_src = piece.src;
      split_bytes += piece.TotalBytes();
      ++pieces;
      // Both sides as a caller sees them that holds only these spans.
      CopyRun(piece, from.data() + piece.src, piece.src,
              split.data() + piece.dst, piece.dst);
    });
    EXPECT_EQ(split_bytes, bytes);
    EXPECT_EQ(split, expected);
    EXPECT_EQ(pieces == 1, run.SrcSpan() <= max_span);
  }
}

TEST(SplitBySrcSpan, CutsRowsThenBytes) {
  torch_ckpt::Run run;
  run.bytes = 10;
  run.loops = 1;
  run.count[0] = 5;
  run.src_stride[0] = 100;
  run.dst_stride[0] = 10;
  std::vector<torch_ckpt::Run> pieces;
  const auto collect = [&](const torch_ckpt::Run& piece) {
    pieces.push_back(piece);
  };
  SplitBySrcSpan(run, 250, collect);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].count[0], 3);
  EXPECT_EQ(pieces[1].src, 300u);
  EXPECT_EQ(pieces[1].dst, 30u);
  pieces.clear();
  SplitBySrcSpan(run, 8, collect);
  ASSERT_EQ(pieces.size(), 10u);
  EXPECT_EQ(pieces[3].src, 108u);
  EXPECT_EQ(pieces[3].dst, 18u);
  EXPECT_EQ(pieces[3].bytes, 2u);
  EXPECT_EQ(pieces[3].loops, 0);
}

}  // namespace
}  // namespace torch_ckpt
