#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "plan/clip.h"

namespace torch_ckpt {
namespace {

// Every (source byte, destination byte) pair of a run, in source order.
std::vector<std::pair<uint64_t, uint64_t>> Bytes(const std::vector<Run>& runs) {
  std::vector<std::pair<uint64_t, uint64_t>> out;
  for (const Run& run : runs) {
    for (uint64_t i = 0; i < run.Iterations(); ++i) {
      uint64_t src = run.src, dst = run.dst, rest = i;
      for (int l = run.loops - 1; l >= 0; --l) {
        const auto at = static_cast<size_t>(l);
        const auto count = static_cast<uint64_t>(run.count[at]);
        src += rest % count * static_cast<uint64_t>(run.src_stride[at]);
        dst += rest % count * static_cast<uint64_t>(run.dst_stride[at]);
        rest /= count;
      }
      for (uint64_t b = 0; b < run.bytes; ++b) {
        out.emplace_back(src + b, dst + b);
      }
    }
  }
  return out;
}

// That every byte of the window comes once, whatever the nest.
std::vector<Run> ExpectBytes(const Run& run, uint64_t lo, uint64_t hi) {
  std::vector<Run> parts;
  ClipRun(run, lo, hi, &parts);
  std::vector<std::pair<uint64_t, uint64_t>> expected, found = Bytes(parts);
  for (const auto& byte : Bytes({run})) {
    if (byte.first >= lo && byte.first < hi) expected.push_back(byte);
  }
  std::sort(expected.begin(), expected.end());
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found, expected) << "[" << lo << ", " << hi << ")";
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_GE(parts[i].src, lo);
    EXPECT_LE(parts[i].src + parts[i].SrcSpan(), hi);
    EXPECT_GT(parts[i].bytes, 0u);
    for (int l = 0; l < parts[i].loops; ++l) {
      EXPECT_GT(parts[i].count[static_cast<size_t>(l)], 1);
    }
  }
  return parts;
}

// The same of a monotone source: few parts, which ascend.
void ExpectClip(const Run& run, uint64_t lo, uint64_t hi) {
  const std::vector<Run> parts = ExpectBytes(run, lo, hi);
  EXPECT_LE(parts.size(), static_cast<size_t>(2 * run.loops + 1));
  const auto bytes = Bytes(parts);
  EXPECT_TRUE(std::is_sorted(bytes.begin(), bytes.end()));
}

TEST(ClipRun, ContiguousAtEveryWindow) {
  torch_ckpt::Run run;
  run.src = 10;
  run.dst = 1000;
  run.bytes = 7;
  for (uint64_t lo = 5; lo < 25; ++lo) {
    for (uint64_t hi = lo; hi < 25; ++hi) ExpectClip(run, lo, hi);
  }
}

TEST(ClipRun, EveryWindowOfANest) {
  // Bytes 3 at a time, 4 times with a gap of 2, that 3 times with a gap.
  torch_ckpt::Run run;
  run.src = 7;
  run.dst = 500;
  run.bytes = 3;
  run.loops = 2;
  run.count = {3, 4};
  run.src_stride = {25, 5};
  run.dst_stride = {-100, 30};
  for (uint64_t lo = 0; lo < 90; ++lo) {
    for (uint64_t hi = lo; hi < 90; ++hi) ExpectClip(run, lo, hi);
  }
}

TEST(ClipRun, OutsideGivesNothing) {
  torch_ckpt::Run run;
  run.src = 100;
  run.bytes = 10;
  std::vector<torch_ckpt::Run> parts;
  ClipRun(run, 0, 100, &parts);
  ClipRun(run, 110, 200, &parts);
  ClipRun(run, 105, 105, &parts);
  EXPECT_TRUE(parts.empty());
}

// A nest of up to four loops whose strides are 0, less than what is inside
// them, or more: unfolded, expanded, and transposed views.
torch_ckpt::Run RandomNest(std::mt19937* random) {
  const auto pick = [&](uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(*random);
  };
  torch_ckpt::Run run;
  run.src = pick(0, 50);
  run.dst = 1000;
  run.bytes = pick(1, 5);
  run.loops = static_cast<int>(pick(0, 4));
  uint64_t dense = run.bytes;  // of the destination, whose bytes are apart
  for (int l = run.loops - 1; l >= 0; --l) {
    const auto at = static_cast<size_t>(l);
    run.count[at] = static_cast<int64_t>(pick(2, 4));
    run.src_stride[at] = pick(0, 3) == 0 ? 0 : static_cast<int64_t>(pick(1, 9));
    run.dst_stride[at] = static_cast<int64_t>(dense);
    dense *= static_cast<uint64_t>(run.count[at]);
  }
  return run;
}

TEST(ClipRun, NestsThatOverlapAndRepeat) {
  std::mt19937 random(2);
  const auto pick = [&](uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    const torch_ckpt::Run run = RandomNest(&random);
    const uint64_t end = run.src + run.SrcSpan();
    for (int window = 0; window < 5; ++window) {
      const uint64_t lo = pick(0, end + 3);
      ExpectBytes(run, lo, lo + pick(0, run.SrcSpan() + 3));
    }
    // Windows side by side give the whole of it, as cells do.
    const uint64_t step = pick(1, run.SrcSpan() + 1);
    uint64_t bytes = 0;
    for (uint64_t lo = 0; lo < end; lo += step) {
      std::vector<torch_ckpt::Run> parts;
      ClipRun(run, lo, lo + step, &parts);
      for (const torch_ckpt::Run& part : parts) bytes += part.TotalBytes();
    }
    EXPECT_EQ(bytes, run.TotalBytes());
  }
}

TEST(SplitBySrcSpan, NestsThatOverlapAndRepeat) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const torch_ckpt::Run run = RandomNest(&random);
    const uint64_t most =
        std::uniform_int_distribution<uint64_t>(1, run.SrcSpan() + 1)(random);
    std::vector<torch_ckpt::Run> pieces;
    SplitBySrcSpan(run, most, [&](const torch_ckpt::Run& piece) {
      EXPECT_LE(piece.SrcSpan(), most);
      pieces.push_back(piece);
    });
    auto found = Bytes(pieces), expected = Bytes({run});
    std::sort(found.begin(), found.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(found, expected);
  }
}

TEST(ClipRun, RandomNests) {
  std::mt19937 random(1);
  const auto pick = [&](uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    torch_ckpt::Run run;
    run.src = pick(0, 50);
    run.dst = pick(0, 50);
    run.bytes = pick(1, 5);
    run.loops = static_cast<int>(pick(0, 4));
    // Monotone: each stride is at least the span of what is inside.
    uint64_t span = run.bytes;
    for (int l = run.loops - 1; l >= 0; --l) {
      const auto at = static_cast<size_t>(l);
      run.count[at] = static_cast<int64_t>(pick(2, 4));
      run.src_stride[at] = static_cast<int64_t>(span + pick(0, 6));
      run.dst_stride[at] = static_cast<int64_t>(pick(1, 1000));
      span += static_cast<uint64_t>((run.count[at] - 1) * run.src_stride[at]);
    }
    for (int window = 0; window < 20; ++window) {
      const uint64_t lo = pick(0, run.src + span + 10);
      ExpectClip(run, lo, lo + pick(0, span + 10));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
