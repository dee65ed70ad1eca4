#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
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

TEST_F(LockTest, SaysWhetherItIsHeldAndTakesNothing) {
  EXPECT_FALSE(*DirectoryLock::IsHeld(path()));
  auto lock = DirectoryLock::Acquire(path());
  ASSERT_TRUE(lock.ok());
  EXPECT_TRUE(*DirectoryLock::IsHeld(path()));
  lock->Release();
  EXPECT_FALSE(*DirectoryLock::IsHeld(path()));
  const pid_t child = fork();
  if (child == 0) {
    auto dying = DirectoryLock::Acquire(path());
    kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_TRUE(std::filesystem::exists(path() + "/.lock"));
  EXPECT_FALSE(*DirectoryLock::IsHeld(path()));
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

// As on a network file system whose server is not asked for flock.
void ReleaseFlocks(const std::string& path) {
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) != path) continue;
    EXPECT_EQ(flock(std::stoi(entry.path().filename().string()), LOCK_UN), 0);
  }
}

TEST_F(LockTest, HoldsWhereFlockIsOfTheNode) {
  auto first = DirectoryLock::Acquire(path());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  ReleaseFlocks(path());
  const Status second = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(second.kind(), ErrorKind::kConflict);
  EXPECT_NE(second.message().find("process " + std::to_string(getpid())),
            std::string::npos)
      << second.message();
  first->Release();
  EXPECT_TRUE(dir().List()->empty());
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

// A data loader's worker that outlives the trainer must not hold its lock.
TEST_F(LockTest, DiesWithItsProcessThoughAChildLives) {
  std::array<int, 2> pipe_ends;
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto lock = DirectoryLock::Acquire(path());
    if (fork() == 0) {
      // Behind fork: what it does in the child it has done.
      const pid_t self = getpid();
      if (write(pipe_ends[1], &self, sizeof self) < 0) _exit(1);
    }
    for (;;) pause();
  }
  pid_t grandchild = 0;
  ASSERT_EQ(read(pipe_ends[0], &grandchild, sizeof grandchild),
            static_cast<ssize_t>(sizeof grandchild));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(kill(grandchild, 0), 0);
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
  kill(grandchild, SIGKILL);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_F(LockTest, RemoveTakesTheDirectoryAlong) {
  const std::string stage = path() + "/stage";
  ASSERT_TRUE(Directory::Create(stage).ok());
  auto lock = DirectoryLock::Acquire(stage);
  ASSERT_TRUE(lock.ok());
  EXPECT_TRUE(lock->Remove().ok());
  EXPECT_FALSE(lock->held());
  EXPECT_TRUE(dir().List()->empty());
  // What somebody has put there stays.
  ASSERT_TRUE(Directory::Create(stage).ok());
  lock = DirectoryLock::Acquire(stage);
  std::ofstream(stage + "/x");
  EXPECT_TRUE(lock->Remove().ok());
  EXPECT_EQ(dir().List()->size(), 1u);
}

TEST_F(LockTest, ALinkIsNotWrittenThrough) {
  std::ofstream(path() + "/precious") << "x";
  std::filesystem::create_symlink(path() + "/precious",
                                  path() + "/" + kLockFileName);
  EXPECT_EQ(DirectoryLock::Acquire(path()).status().kind(),
            ErrorKind::kCorrupt);
  EXPECT_EQ(*dir().ReadFile("precious", 9), "x");
}

#ifdef TORCH_CKPT_FAULTS

// Where the file system refuses both locks of the kernel.
class LockFileTest : public LockTest {
 protected:
  void SetUp() override {
    LockTest::SetUp();
    SetFaultHook([](const FaultSite& site) -> FaultAction {
      return {.sys_errno = Refused(site) ? ENOLCK : 0};
    });
  }
  static bool Refused(const FaultSite& site) {
    const std::string op = site.op;
    return op == "flock" || op.starts_with("ofd_");
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
  EXPECT_FALSE(*DirectoryLock::IsHeld(path()));
  auto lock = DirectoryLock::Acquire(path());
  ASSERT_TRUE(lock.ok()) << lock.status().ToString();
  EXPECT_EQ(dir().List()->size(), 1u) << "nothing is left aside";
}

TEST_F(LockFileTest, OnlyProofOfDeathReplaces) {
  auto own = DirectoryLock::Acquire(path());
  ASSERT_TRUE(own.ok());
  const std::vector<std::string> self = Lines();
  ASSERT_EQ(self.size(), 7u);
  // In a container what calls itself this machine may be another one.
  const bool known = self[1] != "-" && self[3] == "4026531836";
  own->Release();
  struct Case {
    size_t line;
    std::string value;
    bool taken;
  };
  for (const Case& c :
       {Case{0, "elsewhere", false}, Case{1, "other-machine", false},
        Case{2, "other-boot", known}, Case{2, "-", false},  // boot not known
        Case{3, "1", false},      // other pid namespace
        Case{4, "x", false},      // no number
        Case{4, "999999", true},  // no such process
        Case{5, "1", true},       // pid used again
        Case{5, "-", false}}) {
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

// Another host's name and boot prove nothing: two live pods may share a name.
TEST_F(LockFileTest, AnotherBootOfAnotherMachineIsAlive) {
  auto own = DirectoryLock::Acquire(path());
  ASSERT_TRUE(own.ok());
  std::vector<std::string> lines = Lines();
  own->Release();
  lines[1] = "other-machine";
  lines[2] = "other-boot";
  Write(lines);
  EXPECT_EQ(DirectoryLock::Acquire(path()).status().kind(),
            ErrorKind::kConflict);
}

// Machines that were cloned from one image may share what they call themselves.
TEST_F(LockFileTest, AnotherBootOfAnotherHostIsAlive) {
  auto own = DirectoryLock::Acquire(path());
  ASSERT_TRUE(own.ok());
  std::vector<std::string> lines = Lines();
  own->Release();
  lines[0] = "elsewhere";
  lines[2] = "other-boot";
  Write(lines);
  EXPECT_EQ(DirectoryLock::Acquire(path()).status().kind(),
            ErrorKind::kConflict);
}

TEST_F(LockFileTest, ALockThatIsFasterThanOursIsLeftAlone) {
  for (const int rename_error : {0, EINVAL}) {
    auto own = DirectoryLock::Acquire(path());
    ASSERT_TRUE(own.ok());
    std::vector<std::string> stale = Lines();
    own->Release();
    stale[5] = "1";
    Write(stale);
    // Somebody else replaces the dead lock between our look and our step; and
    // a third one comes while we are at it.
    int times = 0;
    Status third;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (Refused(site)) return {.sys_errno = ENOLCK};
      const std::string op = site.op;
      if (op == "openat" && site.path.find(".after-") != std::string::npos &&
          ++times == 1) {
        Write({"elsewhere", "machine", "boot", "1", "2", "3", "4"});
      }
      if (op == "unlinkat" && site.path.find(".after-") != std::string::npos &&
          ++times == 2) {
        third = DirectoryLock::Acquire(path()).status();
      }
      return {.sys_errno = op == "renameat2" ? rename_error : 0};
    });
    const Status status = DirectoryLock::Acquire(path()).status();
    EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
    EXPECT_EQ(third.kind(), ErrorKind::kConflict) << third.ToString();
    EXPECT_EQ(times, 2);
    EXPECT_EQ(Lines()[0], "elsewhere");
    EXPECT_EQ(dir().List()->size(), 1u);
    ASSERT_TRUE(dir().Unlink(kLockFileName, false).ok());
    SetFaultHook([](const FaultSite& site) -> FaultAction {
      return {.sys_errno = Refused(site) ? ENOLCK : 0};
    });
  }
}

TEST_F(LockTest, ARemovedDirectoryIsStale) {
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
    EXPECT_EQ(lock.status().sys_errno(), ESTALE);
    std::filesystem::remove_all(path() + "/done");
  }
}

// A node that remembers the file of a holder on another one, who is done: to
// make it fails, and so does to open it.
TEST_F(LockTest, AFileThatIsOnlyRememberedIsStale) {
  int opens = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool lock = std::string(site.op) == "openat" &&
                      site.path == path() + "/" + kLockFileName;
    return {.sys_errno = lock && ++opens == 1 ? EEXIST : 0};
  });
  const Status status = DirectoryLock::Acquire(path()).status();
  EXPECT_EQ(status.sys_errno(), ESTALE) << status.ToString();
  EXPECT_EQ(opens, 2);
  EXPECT_TRUE(DirectoryLock::Acquire(path()).ok());
}

// NFS and FUSE keep the lock's file under a hidden name while it is open.
TEST_F(LockTest, TheDirectoryGoesAfterItsFileIsClosed) {
  const std::string stage = path() + "/stage", hidden = stage + "/.nfs01";
  ASSERT_TRUE(Directory::Create(stage).ok());
  auto lock = DirectoryLock::Acquire(stage);
  ASSERT_TRUE(lock.ok());
  std::ofstream(hidden) << "x";
  int tries = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) != "rmdir") return {};
    for (const auto& fd :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const auto target = std::filesystem::read_symlink(fd.path(), gone);
      EXPECT_FALSE(target.string().starts_with(stage + "/.lock")) << target;
    }
    if (++tries == 3) std::filesystem::remove(hidden);
    return {};
  });
  EXPECT_TRUE(lock->Remove().ok());
  SetFaultHook(nullptr);
  EXPECT_EQ(tries, 3);
  EXPECT_FALSE(std::filesystem::exists(stage));
}

TEST_F(LockTest, OtherFailuresComeOut) {
  for (const std::string op : {"flock", "ofd_lock"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EIO : 0};
    });
    EXPECT_EQ(DirectoryLock::Acquire(path()).status().sys_errno(), EIO) << op;
  }
}

// One of the two is enough to hold off a second open.
TEST_F(LockTest, EitherLockWillDo) {
  for (const std::string op : {"flock", "ofd_"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool refused = std::string_view(site.op).starts_with(op);
      return {.sys_errno = refused ? ENOLCK : 0};
    });
    auto first = DirectoryLock::Acquire(path());
    ASSERT_TRUE(first.ok()) << op << first.status().ToString();
    EXPECT_FALSE(first->by_file());
    EXPECT_EQ(DirectoryLock::Acquire(path()).status().kind(),
              ErrorKind::kConflict);
    EXPECT_TRUE(*DirectoryLock::IsHeld(path())) << op;
  }
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
