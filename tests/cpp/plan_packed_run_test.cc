#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "plan/copy_run.h"
#include "plan/packed_run.h"

namespace torch_ckpt {
namespace {

torch_ckpt::Run RunOf(const Dims& sizes, const Dims& strides, int64_t unit) {
  const Box box = Box::Whole(sizes);
  torch_ckpt::Run run;
  EXPECT_TRUE(MakeRun({box, 0, strides}, {box, 0, DenseStrides(sizes, unit)},
                      unit, &run));
  return run;
}

// What a device and then the host make of `run`.
void CopyPacked(const torch_ckpt::Run& run, const std::vector<std::byte>& from,
                uint64_t room, std::vector<std::byte>* to) {
  const std::optional<PackedRun> packed = Pack(run, room);
  if (!packed) {
    const auto [first, second] = Halved(run);
    EXPECT_EQ(first.TotalBytes() + second.TotalBytes(), run.TotalBytes());
    CopyPacked(first, from, room, to);
    CopyPacked(second, from, room, to);
    return;
  }
  EXPECT_LE(packed->bytes, room);
  std::vector<std::byte> rows;
  for (const PackedRows& each : packed->rows) {
    EXPECT_GE(each.pitch, each.bytes);
    for (uint64_t r = 0; r < each.count; ++r) {
      const auto begin =
          from.begin() + static_cast<int64_t>(each.from + r * each.pitch);
      ASSERT_LE(each.from + r * each.pitch + each.bytes, from.size());
      rows.insert(rows.end(), begin, begin + static_cast<int64_t>(each.bytes));
    }
  }
  EXPECT_EQ(rows.size(), packed->bytes);
  if (packed->as_wanted) {
    EXPECT_EQ(rows.size(), run.TotalBytes());
    std::copy(rows.begin(), rows.end(),
              to->begin() + static_cast<int64_t>(run.dst));
    return;
  }
  CopyRun(packed->run, rows.data(), 0, to->data(), 0);
}

TEST(PackedRun, RowsThatAreWantedAsTheyStand) {
  const auto packed = Pack(RunOf({1000, 300}, {512, 1}, 1), 1 << 20);
  ASSERT_TRUE(packed);
  EXPECT_TRUE(packed->as_wanted);
  ASSERT_EQ(packed->rows.size(), 1u);
  EXPECT_EQ(packed->rows[0].count, 1000u);
  EXPECT_EQ(packed->rows[0].bytes, 300u);
  EXPECT_EQ(packed->rows[0].pitch, 512u);
}

TEST(PackedRun, WhatIsDenseInAnotherOrderIsOneRow) {
  const auto packed = Pack(RunOf({40, 50, 60}, {2, 4800, 80}, 2), 1 << 20);
  ASSERT_TRUE(packed);
  EXPECT_FALSE(packed->as_wanted);
  ASSERT_EQ(packed->rows.size(), 1u);
  EXPECT_EQ(packed->rows[0].bytes, 240000u);
}

TEST(PackedRun, NarrowRowsBringWhatIsBetweenThem) {
  const auto close = Pack(RunOf({1000}, {8}, 2), 1 << 20);
  ASSERT_EQ(close->rows.size(), 1u);
  EXPECT_EQ(close->rows[0].count, 1u);
  EXPECT_EQ(close->bytes, 999u * 8 + 2);
  const auto far = Pack(RunOf({1000}, {80}, 2), 1 << 20);
  EXPECT_EQ(far->rows[0].count, 1000u);
  EXPECT_EQ(far->bytes, 2000u);
  EXPECT_TRUE(far->as_wanted);
}

TEST(PackedRun, AnyStrides) {
  std::mt19937 random(5);
  const auto draw = [&](int64_t most) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
  };
  for (int round = 0; round < 3000; ++round) {
    const int rank = static_cast<int>(1 + draw(4));
    const int64_t unit = int64_t{1} << draw(4);
    std::vector<int> order(static_cast<size_t>(rank));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Dims sizes = Dims::Filled(rank, 1), strides = Dims::Filled(rank, 0);
    int64_t stride = unit;
    for (const int d : order) {
      sizes[d] = 1 + draw(9);
      const int64_t kind = draw(8);
      if (kind == 0) {  // the same again, or windows
        strides[d] = unit * draw(3);
        stride = std::max(stride, strides[d] * sizes[d] + unit);
        continue;
      }
      if (kind < 4) stride += unit * draw(40);
      strides[d] = stride;
      stride *= sizes[d];
    }
    uint64_t span = static_cast<uint64_t>(unit);
    for (int d = 0; d < rank; ++d) {
      span += static_cast<uint64_t>((sizes[d] - 1) * strides[d]);
    }
    std::vector<std::byte> from(span);
    for (std::byte& each : from) each = static_cast<std::byte>(random());
    const torch_ckpt::Run run = RunOf(sizes, strides, unit);
    std::vector<std::byte> wanted(run.TotalBytes()), found(run.TotalBytes());
    CopyRun(run, from.data(), 0, wanted.data(), 0);
    const uint64_t room = std::max<uint64_t>(
        run.bytes, static_cast<uint64_t>(1 + draw(2 * int64_t(span))));
    CopyPacked(run, from, room, &found);
    ASSERT_EQ(found, wanted) << round;
  }
}

}  // namespace
}  // namespace torch_ckpt
