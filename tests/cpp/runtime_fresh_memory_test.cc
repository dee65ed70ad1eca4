// Who has the system give memory, on which pages, and when: by the calls made.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <chrono>

#include "os/fault.h"
#include "os/memory.h"
#include "runtime/fresh_memory.h"

namespace torch_ckpt {
namespace {

#ifdef TORCH_CKPT_FAULTS

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kPieces = 8;  // of a trial

// The time, as far as these tests know it.
std::chrono::steady_clock::time_point g_now;
std::chrono::steady_clock::time_point Now() {
  return g_now += std::chrono::milliseconds(1);
}

// Counts calls of madvise, and holds up or refuses those that give memory.
class Advices {
 public:
  Advices() {
    SetFaultHook([this](const FaultSite& site) -> FaultAction {
      if (std::string(site.op) != "madvise") return {};
      if (site.path == std::to_string(MADV_NOHUGEPAGE)) ++small;
      if (site.path != std::to_string(internal::kPopulateWrite)) return {};
      const int call = given++;
      if (slow_from <= call && call < slow_until) {
        g_now += std::chrono::milliseconds(60);
      }
      return {.sys_errno = call == refused ? ENOMEM : 0};
    });
  }
  ~Advices() { SetFaultHook(nullptr); }

  int small = 0;  // that memory be of small pages
  int given = 0;
  int slow_from = 0, slow_until = 0, refused = -1;
};

ArenaLease Unfilled(Arena* arena, size_t bytes) {
  auto lease = arena->Lease(bytes, {.present = false});
  EXPECT_TRUE(lease.ok()) << lease.status().ToString();
  return std::move(lease).value();
}

void TakeAll(const ArenaLease& lease, FreshMemory* memory, int64_t pieces) {
  for (int64_t piece = 0; piece < pieces; ++piece) {
    ASSERT_TRUE(memory->Take(piece).ok());
    lease.data()[static_cast<size_t>(piece) * kFillBytes] = std::byte{1};
  }
}

TEST(FreshMemory, TheRestIsOfThePagesThatCameFaster) {
  for (const bool huge_are_slow : {true, false}) {
    Arena arena(256 * kMiB);
    const ArenaLease lease = Unfilled(&arena, 200 * kMiB);
    Advices advices;
    // Huge pages come first.
    advices.slow_from = huge_are_slow ? 0 : kPieces / 2;
    advices.slow_until = advices.slow_from + kPieces / 2;
    FreshMemory memory(&lease, nullptr, Now);
    EXPECT_EQ(advices.small, 1);  // of those that are tried
    TakeAll(lease, &memory, kPieces + 2);
    EXPECT_EQ(advices.given, kPieces + 2);
    EXPECT_EQ(advices.small, huge_are_slow ? 2 : 1);
    EXPECT_EQ(lease.absent(), lease.size() - (kPieces + 2) * kFillBytes);
  }
}

TEST(FreshMemory, IsGivenOnceAndTriedOnlyWhereItIsWorthIt) {
  Arena arena(256 * kMiB);
  {
    const ArenaLease lease = Unfilled(&arena, 32 * kMiB);
    Advices advices;
    FreshMemory memory(&lease, nullptr);
    TakeAll(lease, &memory, 8);
    EXPECT_EQ(advices.given, 8);
    EXPECT_EQ(advices.small, 0);
  }
  const ArenaLease lease = Unfilled(&arena, 32 * kMiB);
  Advices advices;
  FreshMemory memory(&lease, nullptr);
  TakeAll(lease, &memory, 8);
  EXPECT_EQ(advices.given, 0);
}

TEST(FreshMemory, WhereThereIsNoneIsAnError) {
  Arena arena(256 * kMiB);
  const ArenaLease lease = Unfilled(&arena, 150 * kMiB);
  Advices advices;
  advices.refused = 1;
  FreshMemory memory(&lease, nullptr);
  EXPECT_TRUE(memory.Take(0).ok());
  EXPECT_EQ(memory.Take(1).kind(), ErrorKind::kExhausted);
  EXPECT_EQ(lease.absent(), lease.size() - kFillBytes);
  EXPECT_TRUE(memory.Take(1).ok());
}

#endif

class Locker final : public PageLocker {
 public:
  Status Lock(std::byte*, size_t) override {
    ++calls;
    return calls == refused ? Exhausted("no more") : Status();
  }
  void Unlock(std::byte*) override {}
  int calls = 0, refused = 0;
};

TEST(FreshMemory, IsLockedByPieceUntilThatIsRefused) {
  Locker locker;
  Arena arena(64 * kMiB);
  const ArenaLease lease = Unfilled(&arena, 30 * kMiB);
  FreshMemory memory(&lease, &locker);
  EXPECT_EQ(locker.calls, 0);
  ASSERT_TRUE(memory.Take(0).ok());
  EXPECT_EQ(locker.calls, 2);  // each 2 MiB by itself
  ASSERT_TRUE(memory.Take(7).ok());
  EXPECT_EQ(locker.calls, 3);  // half a piece
  EXPECT_EQ(arena.Stats().page_locked, 6 * kMiB);
  locker.refused = 5;
  ASSERT_TRUE(memory.Take(1).ok());
  ASSERT_TRUE(memory.Take(2).ok());
  EXPECT_EQ(locker.calls, 5);
  EXPECT_EQ(arena.Stats().page_locked, 8 * kMiB);
}

}  // namespace
}  // namespace torch_ckpt
