#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "os/lock.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

using LockTest = TemporaryDirectory;

TEST_F(LockTest, HoldsOffEverySecondOpen) {
  auto first = DirectoryLock::Acquire(path());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_TRUE(first->held());
  const Status second = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(second.kind(), ErrorKind::kConflict);
  EXPECT_EQ(second.file(), path());
  first->Release();
  EXPECT_FALSE(first->held());
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

TEST_F(LockTest, MovesAndGoesWithItsOwner) {
  {
    DirectoryLock outer;
    {
      auto inner = DirectoryLock::Acquire(path());
      ASSERT_TRUE(inner.ok());
      outer = std::move(inner).value();
    }
    EXPECT_FALSE(DirectoryLock::Acquire(path()).ok());
  }
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

TEST_F(LockTest, MissingDirectoryIsAnIoError) {
  EXPECT_EQ(DirectoryLock::Acquire(path() + "/no").status().sys_errno(),
            ENOENT);
}

TEST_F(LockTest, AForkedChildDoesNotReleaseIt) {
  auto lock = DirectoryLock::Acquire(path());
  ASSERT_TRUE(lock.ok());
  const pid_t child = fork();
  if (child == 0) {
    lock->Release();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(DirectoryLock::Acquire(path()).status().kind(),
            ErrorKind::kConflict);
}

TEST_F(LockTest, DiesWithItsProcess) {
  const pid_t child = fork();
  if (child == 0) {
    auto lock = DirectoryLock::Acquire(path());
    kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

#ifdef TORCH_CKPT_FAULTS

// Where the file system refuses flock.
class LockFileTest : public LockTest {
 protected:
  void SetUp() override {
    LockTest::SetUp();
    SetFaultHook([](const FaultSite& site) -> FaultAction {
      return {.sys_errno = std::string(site.op) == "flock" ? ENOLCK : 0};
    });
  }
  std::vector<std::string> Lines() {
    std::istringstream in(*dir().ReadFile(kLockFileName, 4096));
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }
  void Write(const std::vector<std::string>& lines) {
    std::ofstream out(path() + "/" + kLockFileName);
    for (const auto& line : lines) out << line << "\n";
  }
};

TEST_F(LockFileTest, HoldsOffAndNamesTheHolder) {
  auto first = DirectoryLock::Acquire(path());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_TRUE(first->by_file());
  const Status second = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(second.kind(), ErrorKind::kConflict);
  EXPECT_NE(second.message().find("process " + std::to_string(getpid())),
            std::string::npos)
      << second.message();
  first->Release();
  EXPECT_TRUE(dir().List()->empty());
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

TEST_F(LockFileTest, ADeadProcessIsReplaced) {
  const pid_t child = fork();
  if (child == 0) {
    auto lock = DirectoryLock::Acquire(path());
    kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_EQ(dir().List()->size(), 1u);
  if (Lines()[0].starts_with("localhost")) GTEST_SKIP();
  auto lock = DirectoryLock::Acquire(path());
  ASSERT_TRUE(lock.ok()) << lock.status().ToString();
  EXPECT_EQ(dir().List()->size(), 1u) << "nothing is left aside";
}

TEST_F(LockFileTest, OnlyProofOfDeathReplaces) {
  auto own = DirectoryLock::Acquire(path());
  ASSERT_TRUE(own.ok());
  const std::vector<std::string> self = Lines();
  ASSERT_EQ(self.size(), 5u);
  if (self[0].starts_with("localhost")) GTEST_SKIP();
  own->Release();
  struct Case {
    size_t line;
    std::string value;
    bool taken;
  };
  for (const Case& c :
       {Case{0, "elsewhere", false},                       // other host
        Case{1, "other-boot", true}, Case{1, "-", false},  // boot not known
        Case{2, "1", false},  // other pid namespace
        Case{3, "x", false},  // no number
        Case{4, "1", true},   // pid used again
        Case{4, "-", false}}) {
    std::vector<std::string> lines = self;
    lines[c.line] = c.value;
    Write(lines);
    auto lock = DirectoryLock::Acquire(path());
    EXPECT_EQ(lock.ok(), c.taken) << c.line << " " << c.value;
    if (!lock.ok()) {
      EXPECT_EQ(lock.status().kind(), ErrorKind::kConflict);
      ASSERT_TRUE(dir().Unlink(kLockFileName, false).ok());
    }
  }
}

TEST_F(LockFileTest, AnUnreadableHolderIsAlive) {
  Write({"cut"});
  const Status status = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_NE(status.message().find("remove it"), std::string::npos);
}

TEST_F(LockFileTest, ALockThatIsFasterThanOursIsLeftAlone) {
  auto own = DirectoryLock::Acquire(path());
  ASSERT_TRUE(own.ok());
  std::vector<std::string> stale = Lines();
  if (stale[0].starts_with("localhost")) GTEST_SKIP();
  own->Release();
  stale[1] = "other-boot";
  Write(stale);
  // Somebody else replaces the dead lock between our look and our rename.
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    if (op == "renameat") Write({"elsewhere", "boot", "1", "2", "3"});
    return {.sys_errno = op == "flock" ? ENOLCK : 0};
  });
  const Status status = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
  EXPECT_EQ(Lines()[0], "elsewhere");
  EXPECT_EQ(dir().List()->size(), 1u);
}

TEST_F(LockTest, ARemovedDirectoryIsAConflict) {
  const std::string stage = path() + "/stage";
  for (const bool made_again : {false, true}) {
    ASSERT_TRUE(Directory::Create(stage).ok());
    bool done = false;  // flock is made once more, for the release
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (std::string(site.op) == "flock" && !std::exchange(done, true)) {
        std::filesystem::rename(stage, path() + "/done");
        if (made_again) std::filesystem::create_directory(stage);
      }
      return {};
    });
    const auto lock = DirectoryLock::Acquire(stage);
    SetFaultHook(nullptr);
    EXPECT_EQ(lock.status().kind(), ErrorKind::kConflict);
    std::filesystem::remove_all(path() + "/done");
  }
}

TEST_F(LockTest, OtherFlockFailuresComeOut) {
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "flock" ? EIO : 0};
  });
  EXPECT_EQ(DirectoryLock::Acquire(path()).status().sys_errno(), EIO);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
