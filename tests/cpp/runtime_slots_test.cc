#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "runtime/slots.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kSlotBytes = 4096;
constexpr int64_t kItems = 500;

class SlotsTest : public testing::Test {
 protected:
  void SetUp() override {
    void* raw = mmap(nullptr, SlotQueue::Bytes(kSlotBytes),
                     PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(raw, MAP_FAILED);
    memory_ = static_cast<std::byte*>(raw);
    queue_ = SlotQueue(memory_, kSlotBytes);
  }
  void TearDown() override { munmap(memory_, SlotQueue::Bytes(kSlotBytes)); }

  Status Send(int workers) const {
    return ForEachItem(workers, kItems, nullptr, [&](int64_t item, int) {
      const auto i = static_cast<uint64_t>(item);
      TC_RETURN_IF_ERROR(queue_.WaitFree(i, patient_));
      std::memset(queue_.slot(i), static_cast<int>(item % 251), kSlotBytes);
      queue_.Fill(i);
      return Status();
    });
  }
  Status Receive(int workers) const {
    return ForEachItem(workers, kItems, nullptr, [&](int64_t item, int) {
      const auto i = static_cast<uint64_t>(item);
      TC_RETURN_IF_ERROR(queue_.WaitFilled(i, patient_));
      const std::vector<std::byte> expected(kSlotBytes,
                                            static_cast<std::byte>(item % 251));
      const bool right =
          std::memcmp(queue_.slot(i), expected.data(), kSlotBytes) == 0;
      queue_.Free(i);
      return right ? Status() : Corrupt("item " + std::to_string(item));
    });
  }

  const StillWanted patient_ = [] { return Status(); };
  std::byte* memory_ = nullptr;
  SlotQueue queue_;
};

TEST_F(SlotsTest, BetweenThreads) {
  Status sent;
  std::thread sender([&] { sent = Send(3); });
  EXPECT_TRUE(Receive(4).ok());
  sender.join();
  EXPECT_TRUE(sent.ok());
}

TEST_F(SlotsTest, BetweenProcesses) {
  const pid_t child = fork();
  if (child == 0) _exit(Send(1).ok() ? 0 : 1);
  EXPECT_TRUE(Receive(2).ok());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(SlotsTest, WaitingEndsWhenNothingIsToCome) {
  const StillWanted unwanted = [] { return Incomplete("gone"); };
  EXPECT_EQ(queue_.WaitFilled(0, unwanted).kind(), ErrorKind::kIncomplete);
  EXPECT_TRUE(queue_.WaitFree(0, unwanted).ok());
  EXPECT_EQ(queue_.WaitFree(SlotQueue::kSlots, unwanted).kind(),
            ErrorKind::kIncomplete);
  // So is what came at the last moment.
  const StillWanted late = [&] {
    queue_.Fill(1);
    return Incomplete("gone, but for this");
  };
  EXPECT_TRUE(queue_.WaitFilled(1, late).ok());
  // What is there is taken, whatever became of the other end.
  queue_.Fill(0);
  EXPECT_TRUE(queue_.WaitFilled(0, unwanted).ok());
}

}  // namespace
}  // namespace torch_ckpt
