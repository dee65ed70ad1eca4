#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "engine/write/output_crcs.h"
#include "engine_test_util.h"
#include "os_test_util.h"
#include "runtime/crc32.h"

namespace torch_ckpt {
namespace {

TEST(OutputCrcs, PiecesOfAnySizeInAnyOrderAndThread) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const std::string text = RandomBytes(5000, static_cast<uint32_t>(round));
    std::vector<ByteRange> ranges;
    for (uint64_t at = random() % 50; at < text.size();) {
      const uint64_t end =
          std::min<uint64_t>(text.size(), at + 1 + random() % 700);
      ranges.push_back({at, end});
      at = end + random() % 3;  // often right behind
    }
    std::vector<ByteRange> pieces;
    for (uint64_t at = 0; at < text.size();) {
      const uint64_t end =
          std::min<uint64_t>(text.size(), at + 1 + random() % 900);
      pieces.push_back({at, end});
      at = end;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    OutputCrcs crcs(ranges);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (size_t i = t; i < pieces.size(); i += 3) {
          const auto [begin, end] = pieces[i];
          crcs.Add(begin, AsBytes(text).subspan(begin, end - begin));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < ranges.size(); ++i) {
      const auto [begin, end] = ranges[i];
      const auto crc = crcs.Find(i);
      ASSERT_OK(crc.status());
      EXPECT_EQ(*crc, Crc32(0, AsBytes(text).data() + begin, end - begin));
    }
  }
}

TEST(OutputCrcs, WhatWasNotAddedIsAnError) {
  const std::string text(100, 'x');
  OutputCrcs crcs({{10, 20}, {50, 60}});
  crcs.Add(0, AsBytes(text).first(55));
  EXPECT_OK(crcs.Find(0).status());
  EXPECT_EQ(crcs.Find(1).status().kind(), ErrorKind::kInternal);
  crcs.Add(55, AsBytes(text).subspan(55));
  EXPECT_OK(crcs.Find(1).status());
}

}  // namespace
}  // namespace torch_ckpt
