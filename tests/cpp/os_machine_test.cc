#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <cerrno>
#include <fstream>

#include "os/machine.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

using MachineTest = TemporaryDirectory;

TEST_F(MachineTest, SaysWhatTheLimitsAre) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 200;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
  const auto open_files = OpenFilesLimit();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(open_files, 200u);

  rlimit locked{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &locked), 0);
  if (locked.rlim_cur == RLIM_INFINITY) {
    EXPECT_EQ(LockedMemoryLimit(), std::nullopt);
  } else {
    EXPECT_EQ(LockedMemoryLimit(), locked.rlim_cur);
  }
}

TEST_F(MachineTest, CountsTheCpusThatItMayUse) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(UsableCpus(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(UsableCpus(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST_F(MachineTest, ReadsSmallFiles) {
  std::ofstream(path() + "/f") << "always [madvise] never\n";
  EXPECT_EQ(ReadSystemFile(path() + "/f"), "always [madvise] never\n");
  EXPECT_EQ(ReadSystemFile(path() + "/gone"), "");
  EXPECT_EQ(ReadSystemFile("/gone/too"), "");
  const std::string pages = HugePagesOfMemory() + HugePagesOfSharedMemory();
  EXPECT_EQ(pages.find_first_of("[] \n"), std::string::npos) << pages;
}

#ifdef TORCH_CKPT_FAULTS

TEST_F(MachineTest, WhatTheSystemRefusesToSayIsNotKnown) {
  SetFaultHook(
      [](const FaultSite&) -> FaultAction { return {.sys_errno = EPERM}; });
  EXPECT_EQ(OpenFilesLimit(), std::nullopt);
  EXPECT_EQ(HugePagesOfMemory(), "");
  EXPECT_GE(UsableCpus(), 1);
}

#endif

}  // namespace
}  // namespace torch_ckpt
