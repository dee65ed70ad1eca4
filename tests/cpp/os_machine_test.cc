#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "os/control_group.h"
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

// Files of the system below a directory.
class ControlGroupTest : public TemporaryDirectory {
 protected:
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path file = path() + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::optional<uint64_t> Room() { return ControlGroupRoom(path()); }
};

TEST_F(ControlGroupTest, TheTightestGroupCounts) {
  Write("/proc/self/cgroup", "0::/job/step\n");
  Write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  Write("/sys/fs/cgroup/job/step/memory.current", "10\n");
  Write("/sys/fs/cgroup/job/memory.max", "1000\n");
  Write("/sys/fs/cgroup/job/memory.current", "700\n");
  Write("/sys/fs/cgroup/job/memory.stat", "anon 100\nfile 600\n");
  EXPECT_EQ(Room(), 900u);  // what files have in the page cache is free
  Write("/sys/fs/cgroup/job/step/memory.max", "500\n");
  EXPECT_EQ(Room(), 900u);  // how much of it is the page cache is not known
  Write("/sys/fs/cgroup/job/step/memory.stat", "file 0\n");
  EXPECT_EQ(Room(), 490u);
  Write("/sys/fs/cgroup/job/step/memory.current", "600\n");
  EXPECT_EQ(Room(), 0u);
  Write("/proc/swaps", "Filename Type\n/swap file\n");
  EXPECT_EQ(Room(), std::nullopt);
}

TEST_F(ControlGroupTest, OfVersion1) {
  Write("/proc/self/cgroup", "5:cpu:/x\n4:memory:/job\n0::/\n");
  Write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "100\n");
  Write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "60\n");
  Write("/sys/fs/cgroup/memory/job/memory.stat", "cache 1\ntotal_cache 20\n");
  EXPECT_EQ(Room(), 60u);
}

TEST_F(ControlGroupTest, WhereNothingIsSaidNothingIsKnown) {
  EXPECT_EQ(Room(), std::nullopt);
  Write("/proc/self/cgroup", "garbage\n0:\n::\n1:memory:relative\n0::/job");
  EXPECT_EQ(Room(), std::nullopt);
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
