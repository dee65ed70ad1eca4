#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "os/fault.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

using FaultTest = TemporaryDirectory;

#ifdef TORCH_CKPT_FAULTS

// What a child process that was started with these faults does: a fork is not
// enough, since the variable is read once. Exits with the errno of the first
// of three writes that fails, 0 when none does. Under an emulator, which cannot
// start what it emulates, $TORCH_CKPT_TEST_RUNNER names the emulator.
int RunChild(const std::string& faults, const std::string& directory) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const char* const runner = std::getenv("TORCH_CKPT_TEST_RUNNER");
  const pid_t child = fork();
  if (child == 0) {
    setenv("TORCH_CKPT_FAULTS", faults.c_str(), 1);
    setenv("TORCH_CKPT_TEST_DIRECTORY", directory.c_str(), 1);
    unsetenv("GTEST_TOTAL_SHARDS");
    unsetenv("GTEST_SHARD_INDEX");
    const char* arguments[] = {runner, self.c_str(),
                               "--gtest_filter=FaultChild.Body",
                               "--gtest_brief=1", nullptr};
    const char** const first = arguments + (runner == nullptr ? 1 : 0);
    execvp(*first, const_cast<char**>(first));
    _exit(255);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(FaultChild, Body) {
  const char* path = std::getenv("TORCH_CKPT_TEST_DIRECTORY");
  if (path == nullptr) GTEST_SKIP() << "runs in a child only";
  auto directory = Directory::Open(path);
  if (!directory.ok()) _exit(directory.status().sys_errno());
  for (const std::string name : {"1", "2", "3"}) {
    const Status status = directory->WriteFile(name, name + " text");
    if (!status.ok()) _exit(status.sys_errno());
  }
  _exit(0);
}

TEST_F(FaultTest, EnvironmentFailsTheNthCall) {
  const int status = RunChild("pwrite:2:ENOSPC", path());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), ENOSPC);
  EXPECT_EQ(*dir().ReadFile("1", 100), "1 text");
  EXPECT_EQ(dir().List()->size(), 1u);
}

TEST_F(FaultTest, EnvironmentFailsOrSkipsEveryCall) {
  EXPECT_EQ(RunChild("fsync:*:EIO", path()), EIO << 8);
  EXPECT_EQ(RunChild("fsync:*:skip,fsync:2:EIO", path()), 0);
}

TEST_F(FaultTest, EnvironmentKillsBeforeTheCall) {
  const int status = RunChild("fsync:9:EIO,pwrite:3:kill", path());
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_EQ(*dir().ReadFile("2", 100), "2 text");
  EXPECT_EQ(*dir().ReadFile("3", 100), "") << "opened, not written";
}

TEST_F(FaultTest, StarCountsEveryCall) {
  // openat of the directory, then openat of the first file.
  const int status = RunChild("*:2:EDQUOT", path());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), EDQUOT);
  EXPECT_TRUE(dir().List()->empty());
}

TEST_F(FaultTest, ShortCountsAreMadeGood) {
  const int status = RunChild("pwrite:1:short,pwrite:2:short", path());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(*dir().ReadFile("1", 100), "1 text");
}

TEST_F(FaultTest, AMisspeltFaultFailsEverything) {
  for (const std::string text :
       {"pwrite", "pwrite:1", "pwrite:0:EIO", "pwrite:x:EIO", "pwrite:1:EWHAT",
        ":1:EIO", "pwrite:1:kill,,"}) {
    const int status = RunChild(text, path());
    ASSERT_TRUE(WIFEXITED(status)) << text;
    EXPECT_EQ(WEXITSTATUS(status), EINVAL) << text;
  }
}

TEST_F(FaultTest, HookSeesOperationAndBothPaths) {
  ASSERT_TRUE(dir().WriteFile("a", "1").ok());
  std::string seen;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    seen += std::string(site.op) + " " + site.path + " " + site.path2 + ";";
    return {};
  });
  EXPECT_TRUE(dir().Rename("a", dir(), "b").ok());
  SetFaultHook(nullptr);
  EXPECT_EQ(seen, "renameat " + path() + "/a " + path() + "/b;");
  EXPECT_EQ(FaultPoint("fsync", "x").sys_errno, 0) << "the hook is gone";
}

#else

TEST_F(FaultTest, NothingIsCompiledIn) {
  EXPECT_EQ(FaultPoint("fsync", path()).sys_errno, 0);
  EXPECT_FALSE(FaultPoint("pwrite", path()).short_count);
}

// A dozen files of tests compile hardly anything then, and would say nothing.
TEST_F(FaultTest, AreToBeCompiledIn) {
  if (std::getenv("TORCH_CKPT_TEST_WHEEL") != nullptr) {
    GTEST_SKIP() << "what users get is tested, which has no fault points";
  }
  FAIL() << "build with -DTORCH_CKPT_FAULTS=ON, or most failures are untested";
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
