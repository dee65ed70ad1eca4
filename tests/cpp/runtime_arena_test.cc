#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "os/fault.h"
#include "os_test_util.h"
#include "runtime/arena.h"

namespace torch_ckpt {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMiB = size_t{1} << 20;

TEST(Arena, LeasesAlignedWritableMemory) {
  Arena arena(16 * kMiB);
  auto lease = arena.Lease(3 * kMiB);
  ASSERT_TRUE(lease.ok()) << lease.status().ToString();
  EXPECT_EQ(lease->size(), 4 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(lease->data()) % (2 * kMiB), 0u);
  std::memset(lease->data(), 1, lease->size());
  EXPECT_EQ(arena.Stats().leased, 4 * kMiB);
  EXPECT_EQ(arena.Lease(0)->size(), 2 * kMiB);
  EXPECT_EQ(arena.Stats().peak_mapped, 6 * kMiB);
}

using ArenaWithFiles = TemporaryDirectory;

// Past that limit the kernel kills; what is small is not worth asking.
TEST_F(ArenaWithFiles, ALimitOfTheControlGroupIsAskedBefore) {
  const auto write = [&](const std::string& name, const std::string& text) {
    const std::filesystem::path file = path() + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  };
  write("/proc/self/cgroup", "0::/job\n");
  write("/sys/fs/cgroup/job/memory.max", std::to_string(70 * kMiB) + "\n");
  write("/sys/fs/cgroup/job/memory.current", "0\n");
  write("/sys/fs/cgroup/job/memory.stat", "file 0\n");
  Arena arena(1024 * kMiB, IdleMemory::kKept, path());
  EXPECT_TRUE(arena.Lease(66 * kMiB).ok());
  const Status status = arena.Lease(128 * kMiB).status();
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_NE(status.ToString().find("memory limit"), std::string::npos);
}

TEST(Arena, ReusesWhatCameBack) {
  Arena arena(16 * kMiB);
  std::byte* first = nullptr;
  {
    auto lease = arena.Lease(8 * kMiB);
    ASSERT_TRUE(lease.ok());
    first = lease->data();
  }
  EXPECT_EQ(arena.Stats().leased, 0u);
  EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);
  // Small leases take parts of the large region, and nothing is wasted on
  // them: four of them fill it, and joined again they serve a large one.
  {
    std::vector<ArenaLease> parts;
    for (int i = 0; i < 4; ++i) {
      auto part = arena.Lease(2 * kMiB);
      ASSERT_TRUE(part.ok());
      EXPECT_GE(part->data(), first);
      EXPECT_LT(part->data(), first + 8 * kMiB);
      parts.push_back(std::move(part).value());
    }
    EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);
    std::swap(parts[0], parts[2]);  // another order of coming back
  }
  auto whole = arena.Lease(8 * kMiB);
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->data(), first);
  EXPECT_EQ(arena.Stats().peak_mapped, 8 * kMiB);
}

TEST(Arena, UnmapsIdleMemoryToMakeRoom) {
  Arena arena(8 * kMiB);
  auto low = arena.Lease(2 * kMiB);
  auto mid = arena.Lease(2 * kMiB);
  auto high = arena.Lease(4 * kMiB);
  ASSERT_TRUE(low.ok() && mid.ok() && high.ok());
  low->Release();
  high->Release();
  auto large = arena.Lease(6 * kMiB);
  ASSERT_TRUE(large.ok()) << large.status().ToString();
  EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);
  EXPECT_EQ(arena.Stats().leased, 8 * kMiB);
  std::memset(mid->data(), 2, mid->size());
  std::memset(large->data(), 3, large->size());
}

TEST(Arena, RefusesWhatCanNeverFit) {
  Arena arena(4 * kMiB);
  for (size_t bytes : {6 * kMiB, SIZE_MAX, SIZE_MAX / 2}) {
    EXPECT_EQ(
        arena.Lease(bytes, {.patience = milliseconds::max()}).status().kind(),
        ErrorKind::kExhausted);
  }
}

TEST(Arena, WaitsUntilItsPatienceEnds) {
  Arena arena(4 * kMiB);
  auto lease = arena.Lease(4 * kMiB);
  ASSERT_TRUE(lease.ok());
  const auto start = std::chrono::steady_clock::now();
  const Status status = arena.Lease(1, {.patience = milliseconds(30)}).status();
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(30));
  EXPECT_EQ(arena.Stats().leased, 4 * kMiB);
}

TEST(Arena, AWaiterGetsWhatComesBack) {
  Arena arena(4 * kMiB);
  auto lease = arena.Lease(4 * kMiB);
  ASSERT_TRUE(lease.ok());
  std::thread other([&] {
    auto waited = arena.Lease(2 * kMiB, {.patience = milliseconds::max()});
    EXPECT_TRUE(waited.ok()) << waited.status().ToString();
  });
  std::this_thread::sleep_for(milliseconds(20));
  lease->Release();
  lease->Release();  // does nothing
  other.join();
  EXPECT_EQ(arena.Stats().leased, 0u);
}

TEST(Arena, ASmallerBudgetTakesEffectAsLeasesComeBack) {
  Arena arena(8 * kMiB);
  auto a = arena.Lease(4 * kMiB);
  auto b = arena.Lease(4 * kMiB);
  ASSERT_TRUE(a.ok() && b.ok());
  arena.SetBudget(4 * kMiB);
  EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);
  EXPECT_FALSE(arena.Lease(1).ok());
  a->Release();
  EXPECT_EQ(arena.Stats().mapped, 4 * kMiB);
  EXPECT_FALSE(arena.Lease(1).ok());
  b->Release();
  EXPECT_TRUE(arena.Lease(1).ok());
  arena.Trim();
  EXPECT_EQ(arena.Stats().mapped, 0u);
  EXPECT_EQ(arena.Stats().budget, 4 * kMiB);
}

TEST(Arena, ThreadsNeverShareMemoryNorPassTheBudget) {
  Arena arena(16 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&arena, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 60; ++i) {
        auto lease = arena.Lease((random() % 4 + 1) * kMiB,
                                 {.patience = milliseconds::max()});
        ASSERT_TRUE(lease.ok()) << lease.status().ToString();
        const auto mark = static_cast<std::byte>(t);
        for (size_t at = 0; at < lease->size(); at += 4096) {
          lease->data()[at] = mark;
        }
        std::this_thread::yield();
        for (size_t at = 0; at < lease->size(); at += 4096) {
          ASSERT_EQ(lease->data()[at], mark);
        }
        if (i % 16 == 0) arena.Trim();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(arena.Stats().leased, 0u);
  EXPECT_LE(arena.Stats().peak_mapped, 16 * kMiB);
}

TEST(Arena, RefusesInAForkedChild) {
  Arena arena(8 * kMiB);
  auto lease = arena.Lease(1);
  ASSERT_TRUE(lease.ok());
  const pid_t child = fork();
  if (child == 0) {
    const Status status = arena.Lease(1).status();
    lease->Release();  // must neither hang nor touch the memory
    arena.Trim();
    _exit(status.kind() == ErrorKind::kUnsupported ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  lease->data()[0] = std::byte{1};
}

TEST(Arena, WaitingEndsWithTheJob) {
  Arena arena(4 * kMiB);
  auto lease = arena.Lease(4 * kMiB);
  ASSERT_TRUE(lease.ok());
  Job job;
  Status status;
  std::thread waiter([&] {
    status =
        arena.Lease(1, {.patience = milliseconds::max(), .job = &job}).status();
  });
  std::this_thread::sleep_for(milliseconds(20));
  job.Cancel();
  waiter.join();
  EXPECT_EQ(status.kind(), ErrorKind::kCancelled);
  // Only waiting: what is there is leased.
  lease->Release();
  EXPECT_TRUE(arena.Lease(1, {.job = &job}).ok());
}

TEST(Arena, PagesThatNobodyHasFilledAreKnown) {
  Arena arena(16 * kMiB);
  for (MemoryKind kind : {MemoryKind::kPrivate, MemoryKind::kShared}) {
    auto lease = arena.Lease(8 * kMiB, {.kind = kind, .present = false});
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(lease->absent(), 8 * kMiB);
    ASSERT_TRUE(lease->MakePresent(3 * kMiB, 2 * kMiB).ok());
    EXPECT_EQ(lease->absent(), 4 * kMiB);  // whole pages of 2 MiB
    lease->Release();
    // Whoever has the memory next finds what is left of it.
    auto next = arena.Lease(8 * kMiB, {.kind = kind, .present = false});
    EXPECT_EQ(next->absent(), 4 * kMiB);
    next->Release();
    auto whole = arena.Lease(8 * kMiB, {.kind = kind});
    EXPECT_EQ(whole->absent(), 0u);
    std::memset(whole->data(), 1, whole->size());
    arena.Trim();
  }
}

TEST(Arena, TheProcessHasOne) {
  EXPECT_EQ(&Arena::Process(), &Arena::Process());
  EXPECT_GT(Arena::Process().Stats().budget, 0u);
}

#ifdef TORCH_CKPT_FAULTS
TEST(Arena, NoMemoryIsAnErrorThatLeavesTheBudgetWhole) {
  Arena arena(8 * kMiB);
  SetFaultHook(
      [](const FaultSite&) -> FaultAction { return {.sys_errno = ENOMEM}; });
  const Status status = arena.Lease(8 * kMiB).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(arena.Stats().mapped, 0u);
  // Mapped, but it cannot be kept out of children or be made present.
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "madvise" ? ENOMEM : 0};
  });
  Arena other(8 * kMiB);
  const Status advised = other.Lease(8 * kMiB).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(advised.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(other.Stats().mapped, 0u);
  EXPECT_TRUE(other.Lease(8 * kMiB).ok());
}
#endif

TEST(Arena, KnowsWhatIsLeased) {
  Arena arena(16 * kMiB);
  auto lease = arena.Lease(3 * kMiB);
  ASSERT_TRUE(lease.ok());
  std::byte* const data = lease->data();
  EXPECT_TRUE(arena.IsLeased(lease->span()));
  EXPECT_TRUE(arena.IsLeased({data + 100, 1}));
  EXPECT_FALSE(arena.IsLeased({data + 1, lease->size()}));
  EXPECT_FALSE(arena.IsLeased({data - 1, 1}));
  int other = 0;
  EXPECT_FALSE(arena.IsLeased({reinterpret_cast<std::byte*>(&other), 1}));
  lease->Release();
  EXPECT_FALSE(arena.IsLeased({data, 1}));
}

TEST(Arena, IdleMemoryThatDoesNotServeIsReplaced) {
  Arena arena(64 * kMiB, IdleMemory::kReplaced);
  for (size_t size = 2; size <= 20; size += 2) {
    auto lease = arena.Lease(size * kMiB);
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(arena.Stats().mapped, size * kMiB);
  }
  // A smaller one is cut from what there is.
  auto lease = arena.Lease(6 * kMiB);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(arena.Stats().mapped, 20 * kMiB);
}

TEST(Arena, ALeaseOfSharedMemorySaysWhereOthersFindIt) {
  Arena arena(64 * kMiB);
  auto own = arena.Lease(2 * kMiB);
  auto a = arena.Lease(2 * kMiB, {.kind = MemoryKind::kShared});
  auto b = arena.Lease(3 * kMiB, {.kind = MemoryKind::kShared});
  ASSERT_TRUE(own.ok() && a.ok() && b.ok());
  EXPECT_FALSE(own->shared());
  ASSERT_TRUE(a->shared() && b->shared());
  EXPECT_EQ(a->shared()->fd, b->shared()->fd);
  EXPECT_EQ(a->shared()->offset, 0u);
  EXPECT_EQ(b->shared()->offset, 2 * kMiB);
  EXPECT_EQ(b->size(), 4 * kMiB);
  EXPECT_EQ(arena.Stats().leased, 8 * kMiB);
  ArenaLease moved = std::move(*b);
  EXPECT_EQ(moved.shared()->offset, 2 * kMiB);
  EXPECT_FALSE(b->shared());
  EXPECT_TRUE(arena.IsLeased(moved.span()));
  std::memset(moved.data(), 1, moved.size());
}

TEST(Arena, IdleMemoryServesItsKindOnly) {
  Arena arena(64 * kMiB);
  std::byte *own = nullptr, *shared = nullptr;
  {
    auto a = arena.Lease(8 * kMiB);
    auto b = arena.Lease(2 * kMiB, {.kind = MemoryKind::kShared});
    auto c = arena.Lease(6 * kMiB, {.kind = MemoryKind::kShared});
    ASSERT_TRUE(a.ok() && b.ok() && c.ok());
    own = a->data();
    shared = b->data();
  }
  auto a = arena.Lease(8 * kMiB, {.kind = MemoryKind::kShared});
  auto b = arena.Lease(8 * kMiB);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->data(), shared);  // of two pieces
  EXPECT_EQ(b->data(), own);
  EXPECT_EQ(arena.Stats().mapped, 16 * kMiB);
}

TEST(Arena, OneBudgetForBothKinds) {
  Arena arena(8 * kMiB);
  auto a = arena.Lease(4 * kMiB);
  auto b = arena.Lease(4 * kMiB, {.kind = MemoryKind::kShared});
  ASSERT_TRUE(a.ok() && b.ok());
  for (MemoryKind kind : {MemoryKind::kPrivate, MemoryKind::kShared}) {
    EXPECT_EQ(arena.Lease(1, {.kind = kind}).status().kind(),
              ErrorKind::kExhausted);
  }
  a->Release();
  auto c = arena.Lease(2 * kMiB, {.kind = MemoryKind::kShared});
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);  // 2 MiB of a's stay
  b->Release();
  auto d = arena.Lease(6 * kMiB);
  ASSERT_TRUE(d.ok()) << d.status().ToString();
  EXPECT_EQ(arena.Stats().mapped, 8 * kMiB);
  std::memset(c->data(), 1, c->size());
  std::memset(d->data(), 1, d->size());
}

TEST(Arena, IdleMemoryOfAnyKindIsReplaced) {
  Arena arena(64 * kMiB, IdleMemory::kReplaced);
  for (size_t size = 2; size <= 20; size += 2) {
    const MemoryKind kind =
        size % 4 == 0 ? MemoryKind::kShared : MemoryKind::kPrivate;
    auto lease = arena.Lease(size * kMiB, {.kind = kind});
    ASSERT_TRUE(lease.ok());
    std::memset(lease->data(), 1, lease->size());
    EXPECT_EQ(arena.Stats().mapped, size * kMiB);
  }
  arena.Trim();
  EXPECT_EQ(arena.Stats().mapped, 0u);
}

#ifdef TORCH_CKPT_FAULTS
TEST(Arena, MemoryIsPrivateWhereNoneCanBeShared) {
  Arena arena(16 * kMiB);
  std::byte* first = nullptr;
  const auto leased = [&](const char* refused) {
    SetFaultHook([=](const FaultSite& site) -> FaultAction {
      return {.sys_errno = std::string(site.op) == refused ? EPERM : 0};
    });
    auto lease = arena.Lease(4 * kMiB, {.kind = MemoryKind::kShared});
    SetFaultHook(nullptr);
    EXPECT_TRUE(lease.ok()) << lease.status().ToString();
    if (first == nullptr) first = lease->data();
    const bool reused = lease->data() == first;
    return std::pair(bool(lease->shared()), reused);
  };
  EXPECT_EQ(leased("memfd_create"), std::pair(false, true));
  EXPECT_EQ(leased("ftruncate"), std::pair(false, true));
  EXPECT_EQ(leased("fallocate"), std::pair(false, true));
  EXPECT_EQ(leased(""), std::pair(true, false));
}

TEST(Arena, WhatTheSystemDoesNotTakeBackIsStillThere) {
  for (MemoryKind kind : {MemoryKind::kPrivate, MemoryKind::kShared}) {
    Arena arena(8 * kMiB);
    std::byte* const data = arena.Lease(4 * kMiB, {.kind = kind})->data();
    data[0] = std::byte{1};
    // As where a mapping is to be cut in two and there are too many.
    SetFaultHook([](const FaultSite& site) -> FaultAction {
      const bool refused = std::string(site.op) == "munmap" ||
                           std::string(site.op) == "fallocate";
      return {.sys_errno = refused ? ENOMEM : 0};
    });
    arena.Trim();
    EXPECT_EQ(arena.Stats().mapped, 4 * kMiB);
    // It leaves no room in the budget, and serves again.
    EXPECT_EQ(arena.Lease(6 * kMiB, {.kind = kind}).status().kind(),
              ErrorKind::kExhausted);
    auto again = arena.Lease(4 * kMiB, {.kind = kind});
    SetFaultHook(nullptr);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->data(), data);
    EXPECT_EQ(data[0], std::byte{1});
    again->Release();
    arena.Trim();
    EXPECT_EQ(arena.Stats().mapped, 0u);
  }
}

TEST(Arena, NoSharedMemoryIsAnErrorThatLeavesTheBudgetWhole) {
  Arena arena(8 * kMiB);
  ASSERT_TRUE(arena.Lease(1, {.kind = MemoryKind::kShared}).ok());
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "madvise" ? ENOMEM : 0};
  });
  const Status status =
      arena.Lease(4 * kMiB, {.kind = MemoryKind::kShared}).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(arena.Stats().mapped, 2 * kMiB);
  EXPECT_TRUE(arena.Lease(8 * kMiB, {.kind = MemoryKind::kShared}).ok());
}
#endif

}  // namespace
}  // namespace torch_ckpt
