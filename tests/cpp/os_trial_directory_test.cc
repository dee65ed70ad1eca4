#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "os/trial_directory.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDead = ".torch_ckpt-doctor-0123456789abcdef";

class TrialDirectoryTest : public TemporaryDirectory {
 protected:
  // A directory with a file in it.
  fs::path Put(const std::string& name) {
    const fs::path made = fs::path(path()) / name;
    fs::create_directories(made / "below");
    std::ofstream(made / "below" / "file") << "text";
    return made;
  }
  // Makes one and removes it.
  void Try() {
    auto own = TrialDirectory::Make(dir());
    ASSERT_TRUE(own.ok()) << own.status().ToString();
    const Status gone = own->Remove();
    EXPECT_TRUE(gone.ok()) << gone.ToString();
  }
};

TEST_F(TrialDirectoryTest, IsLockedAndGoesWithWhatIsInIt) {
  auto own = TrialDirectory::Make(dir());
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  EXPECT_TRUE(own->lock().ok()) << own->lock().status().ToString();
  ASSERT_TRUE(own->directory().WriteFile("trial", "text").ok());
  ASSERT_TRUE(own->directory().MakeDirectory("inner").ok());
  EXPECT_TRUE(own->Remove().ok());
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(TrialDirectoryTest, RemovesThoseOfTheDead) {
  const fs::path dead = Put(kDead);
  std::ofstream(dead / kLockFileName) << "whoever it was";
  Try();
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(TrialDirectoryTest, LeavesThoseOfTheLiving) {
  auto other = TrialDirectory::Make(dir());
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(other->directory().WriteFile("trial", "text").ok());
  Try();
  const auto text = other->directory().ReadFile("trial", 100);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_TRUE(fs::exists(other->directory().path()));
  EXPECT_TRUE(other->Remove().ok());
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(TrialDirectoryTest, LeavesWhatIsNoneOfThem) {
  const fs::path kept = Put("kept");
  for (const char* name :
       {".torch_ckpt-doctor-", ".torch_ckpt-doctor-0123456789abcdeg",
        ".torch_ckpt-doctor-0123456789abcdef0", "torch_ckpt-doctor"}) {
    Put(name);
  }
  // A file of that name, and a link to what is of somebody else.
  std::ofstream(fs::path(path()) / ".torch_ckpt-doctor-00000000000000ff") << "";
  fs::create_directory_symlink(kept, fs::path(path()) / kDead);
  Try();
  EXPECT_EQ(std::distance(fs::directory_iterator(path()), {}), 7);
  EXPECT_TRUE(fs::exists(kept / "below" / "file"));
  EXPECT_FALSE(fs::exists(kept / kLockFileName));
}

#ifdef TORCH_CKPT_FAULTS

TEST_F(TrialDirectoryTest, AnotherIsMadeWhereOneIsTakenForDead) {
  int locked = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) != "flock" || ++locked > 1) return {};
    fs::remove_all(site.path);
    return {.sys_errno = EWOULDBLOCK};
  });
  Try();
  EXPECT_EQ(locked, 3);  // the second one is locked, and unlocked
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(TrialDirectoryTest, IsThereWithoutALock) {
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "flock" ? EIO : 0};
  });
  auto own = TrialDirectory::Make(dir());
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  EXPECT_EQ(own->lock().status().sys_errno(), EIO);
  ASSERT_TRUE(own->directory().WriteFile("trial", "text").ok());
  EXPECT_TRUE(own->Remove().ok());
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(TrialDirectoryTest, WhatCannotBeRemovedIsNoError) {
  Put(kDead);
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    const bool dead = site.path.find(kDead) != std::string::npos;
    return {.sys_errno = dead && std::string(site.op) == "unlinkat" ? EIO : 0};
  });
  Try();
  EXPECT_TRUE(fs::exists(fs::path(path()) / kDead / "below" / "file"));
}

#endif

}  // namespace
}  // namespace torch_ckpt
