#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "os/trials.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

class TrialsTest : public TemporaryDirectory {
 protected:
  void TearDown() override {
    EXPECT_TRUE(std::filesystem::is_empty(path())) << "a trial left a file";
    TemporaryDirectory::TearDown();
  }
};

TEST_F(TrialsTest, SayWhatWorksAndLeaveNothing) {
  const auto space = SpaceOf(dir());
  ASSERT_TRUE(space.ok()) << space.status().ToString();
  const auto same = std::filesystem::space(path());
  EXPECT_EQ(space->total, same.capacity);
  EXPECT_LE(space->available, space->total);
  const auto uncached = TryDirectIo(dir());
  ASSERT_TRUE(uncached.ok()) << uncached.status().ToString();
  if (uncached->works) {
    EXPECT_GT(uncached->offset_unit, 0u);
    EXPECT_GT(uncached->memory_unit, 0u);
  }
  EXPECT_TRUE(TryAllocate(dir()).ok());
  EXPECT_TRUE(TryNoReplace(dir()).ok());
  {
    const auto held = DirectoryLock::Acquire(path());
    ASSERT_TRUE(held.ok()) << held.status().ToString();
    const auto lock = TryLock(*held);
    ASSERT_TRUE(lock.ok()) << lock.status().ToString();
    EXPECT_TRUE(lock->excludes);
    EXPECT_FALSE(lock->by_file);
  }
  const auto sync = TimeSync(dir());
  ASSERT_TRUE(sync.ok()) << sync.status().ToString();
  EXPECT_GT(*sync, 0);
}

#ifdef TORCH_CKPT_FAULTS

// Fails every call of one operation, as a file system that lacks it.
void Fail(const std::string& op, int error) {
  SetFaultHook([op, error](const FaultSite& site) -> FaultAction {
    return {.sys_errno = site.op == op ? error : 0};
  });
}

TEST_F(TrialsTest, WhatAFileSystemLacksIsNoError) {
  Fail("fallocate", EOPNOTSUPP);
  EXPECT_EQ(*TryAllocate(dir()), false);
  for (const int error : {EINVAL, ENOSYS, EOPNOTSUPP}) {
    Fail("renameat2", error);
    EXPECT_EQ(*TryNoReplace(dir()), false);
  }
  Fail("fcntl(O_DIRECT)", EINVAL);
  EXPECT_EQ(TryDirectIo(dir())->works, false);
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    const bool past = site.transfer != nullptr && site.transfer->direct;
    return {.sys_errno = past ? EINVAL : 0};
  });
  EXPECT_EQ(TryDirectIo(dir())->works, false);
}

TEST_F(TrialsTest, ALockThatIsAFileAloneIsSeen) {
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    return {.sys_errno =
                op == "flock" || op.starts_with("ofd_") ? EOPNOTSUPP : 0};
  });
  const auto held = DirectoryLock::Acquire(path());
  ASSERT_TRUE(held.ok()) << held.status().ToString();
  const auto lock = TryLock(*held);
  ASSERT_TRUE(lock.ok()) << lock.status().ToString();
  EXPECT_TRUE(lock->by_file);
  EXPECT_TRUE(lock->excludes);
}

TEST_F(TrialsTest, EachFailureComesOutAndLeavesNothing) {
  const auto with = [&](const std::string& op, int error, const auto& trial) {
    Fail(op, error);
    const Status status = trial(dir()).status();
    SetFaultHook(nullptr);
    EXPECT_EQ(status.sys_errno(), error) << op << ": " << status.ToString();
    EXPECT_TRUE(std::filesystem::is_empty(path())) << op;
  };
  with("fstatvfs", EIO, SpaceOf);
  with("openat", EROFS, TryAllocate);
  with("fallocate", ENOSPC, TryAllocate);
  with("statx", EIO, TryDirectIo);
  with("pwrite", ENOSPC, TryDirectIo);
  with("close", EIO, TryDirectIo);
  with("renameat2", EACCES, TryNoReplace);
  with("pwrite", ENOSPC, TimeSync);
  with("fsync", EIO, TimeSync);
  const auto held = DirectoryLock::Acquire(path());
  ASSERT_TRUE(held.ok()) << held.status().ToString();
  Fail("flock", EIO);
  EXPECT_EQ(TryLock(*held).status().sys_errno(), EIO);
}

#endif

}  // namespace
}  // namespace torch_ckpt
