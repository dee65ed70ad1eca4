// Loads of bytes that the page cache has, or has not.
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/checked.h"
#include "engine/read/read_job.h"
#include "engine_test_util.h"
#include "os/fault.h"
#include "os_test_util.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

#ifdef TORCH_CKPT_FAULTS

class ReadCacheTest : public EngineDiskTest {
 protected:
  // Runs `plan` of one item, into memory of `sizes` float32.
  static std::string ReadF32(const CheckpointPtr& checkpoint,
                             const ReadPlan& plan, const Dims& sizes) {
    std::string memory(static_cast<size_t>(sizes.Product()) * 4, '\0');
    Job job;
    EXPECT_OK(RunReadJob(checkpoint, plan,
                         {{reinterpret_cast<std::byte*>(memory.data()), sizes,
                           DenseStrides(sizes, 4), 4}},
                         &job)
                  .status());
    return memory;
  }
};

// A cache that holds nothing, a part, or answers short: the same bytes.
TEST_F(ReadCacheTest, TheCacheMayGiveOutAnywhere) {
  const Array a = MakeArray(Dtype::kF32, {1024, 1024}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {1, 2})).status());
  // Mode 3 and up: the same where the kernel does not say what is cached.
  for (int mode = 0; mode < 6; ++mode) {
    for (const auto& file : std::filesystem::directory_iterator(Path("c"))) {
      std::ifstream(file.path()).ignore(std::numeric_limits<int>::max());
    }
    std::atomic<int> calls = 0;  // workers come here too
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "cachestat") return {.sys_errno = mode < 3 ? 0 : ENOSYS};
      if (op != "preadv2") return {};
      ++calls;
      if (mode % 3 == 0) return {.sys_errno = EAGAIN};
      if (mode % 3 == 1) return {.short_count = true};
      return {.sys_errno = calls % 2 == 0 ? EOPNOTSUPP : 0};
    });
    auto all = ReadAll(Path("c"));
    SetFaultHook(nullptr);
    ASSERT_OK(all.status());
    EXPECT_TRUE(all->at("a") == a.bytes) << mode;
    if (mode >= 3) {
      EXPECT_GT(calls, 0) << mode;
    }
  }
}

// What other processes of the machine want as well goes through the page cache,
// in pieces that stay in the CPU's.
TEST_F(ReadCacheTest, WhatNeighboursWantIsReadThroughTheCache) {
  const Array a = MakeArray(Dtype::kF32, {2048, 2048}, 1);  // 16 MiB
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  // Bytes that were read past the cache.
  const auto past = [&](const Box& box, bool neighbours, bool shared) {
    ReadPlan plan;
    plan.neighbours = neighbours;
    plan.items.push_back({"a", box, {}, 0, shared});
    std::atomic<uint64_t> direct = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "cachestat") return {.sys_errno = ENOSYS};
      if (op == "preadv2") return {.sys_errno = EAGAIN};
      if (site.transfer && site.transfer->direct) {
        direct += site.transfer->bytes;
      } else if (site.transfer && shared) {
        EXPECT_LE(site.transfer->bytes, kDigestStep);
      }
      return {};
    });
    const std::string memory = ReadF32(*checkpoint, plan, box.sizes);
    SetFaultHook(nullptr);
    EXPECT_TRUE(memory == BoxBytes(a, box));
    return direct.load();
  };
  const Box whole = Box::Whole(a.shape);
  const Box rows{{512, 0}, {1024, 2048}}, columns{{0, 512}, {2048, 512}};
  if (past(whole, false, false) == 0) GTEST_SKIP() << "no direct I/O here";
  EXPECT_EQ(past(whole, true, true), 0u);
  EXPECT_GE(past(rows, true, false), uint64_t{8} << 20);
  EXPECT_EQ(past(columns, true, false), 0u);
  EXPECT_GE(past(columns, false, false), uint64_t{15} << 20);
  // From the middle of a segment to that of another: these two are shared.
  const Box inner{{64, 0}, {512, 2048}};
  EXPECT_EQ(past(inner, true, false) >> 20, 3u);
  EXPECT_EQ(past(inner, false, false) >> 20, 5u);
}

// The system takes its time to give a page: who reads from the page cache asks
// for a few.
TEST_F(ReadCacheTest, BuffersHaveThePagesThatAreNeeded) {
  const Array a = MakeArray(Dtype::kF32, {2048, 2048}, 1);  // 16 MiB
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  const auto absent = [&](bool cached) -> uint64_t {
    for (const auto& file : std::filesystem::directory_iterator(Path("c"))) {
      std::ifstream(file.path()).ignore(std::numeric_limits<int>::max());
    }
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "cachestat") return {.sys_errno = ENOSYS};
      return {.sys_errno = op == "preadv2" && !cached ? EAGAIN : 0};
    });
    Arena::Process().Trim();
    ReadPlan plan;
    plan.workers = 1;
    plan.items.push_back({"a", Box::Whole(a.shape), {}, 0});
    const std::string memory = ReadF32(*checkpoint, plan, a.shape);
    SetFaultHook(nullptr);
    EXPECT_TRUE(memory == a.bytes);
    // The memory that the job has given back.
    const auto lease = LeaseBuffer(kFetchBytes, nullptr, /*present=*/false);
    EXPECT_OK(lease.status());
    return lease->absent();
  };
  EXPECT_EQ(absent(/*cached=*/true),
            RoundUp(kFetchBytes, kArenaPage) - kArenaPage);
  EXPECT_EQ(absent(/*cached=*/false), 0u);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
