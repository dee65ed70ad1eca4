// Files of torch.save and directories of stock DCP, put into place by one
// rename.
#include <cerrno>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "engine/commit/commit.h"
#include "engine/commit/foreign_target.h"
#include "engine_commit_test_util.h"
#include "engine_crash_states.h"
#include "os/fault.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

const std::string kMagic("PK\x03\x04");
const std::string kOld = kMagic + "old", kNew = kMagic + "new",
                  kThird = kMagic + "third";

class ForeignTargetTest : public CommitTest {
 protected:
  ForeignTarget Target(bool is_file, bool overwrite = true) const {
    return {Path(at_ + "c"), is_file, overwrite};
  }
  // Stages a file as a conversion does, and takes the session.
  Status Begin(const ForeignTarget& target, const std::string& text,
               std::optional<SaveSession>* session) {
    TC_ASSIGN_OR_RETURN(SaveSession begun, BeginForeign(target));
    session->emplace(std::move(begun));
    return (*session)->directory().WriteFile("f", text);
  }
  Status Put(const ForeignTarget& target, const std::string& text) {
    std::optional<SaveSession> session;
    TC_RETURN_IF_ERROR(Begin(target, text, &session));
    return CommitForeign(&*session, target, "f");
  }
  // What stands at the target `path`; empty where nothing does.
  static std::string Held(const std::string& path) {
    if (fs::is_directory(path)) {
      return fs::is_empty(path) ? "" : ReadText(path + "/f");
    }
    return fs::exists(path) ? ReadText(path) : "";
  }
  void ForBoth(const std::function<void(bool is_file)>& test) {
    for (const bool is_file : {true, false}) {
      fs::remove_all(Path("c"));
      test(is_file);
      ExpectNoStaging();
      if (HasFailure()) return;
    }
  }
  // CommitTest's, of what may be a file.
  void ExpectNoStaging() const {
    for (const std::string& name : Names(root())) {
      EXPECT_FALSE(name.ends_with(kStageSuffix)) << name;
    }
  }
  void CheckCrashes(bool is_file, bool existing);

  std::string at_;
};

TEST_F(ForeignTargetTest, IsPutIntoPlace) {
  ForBoth([&](bool is_file) {
    ASSERT_OK(Put(Target(is_file, /*overwrite=*/false), kNew));
    EXPECT_EQ(Held(Path("c")), kNew);
    EXPECT_EQ(Names(root()), std::vector<std::string>{"c"});
  });
  ASSERT_OK(Put({Path("d/e/f"), true, false}, kNew));
  EXPECT_EQ(Held(Path("d/e/f")), kNew);
}

TEST_F(ForeignTargetTest, WhatMayBeReplaced) {
  WriteText(Path("c"), kOld);
  ASSERT_OK(Put(Target(true), kNew));
  EXPECT_EQ(Held(Path("c")), kNew);
  fs::remove(Path("c"));
  fs::create_directory(Path("c"));
  ASSERT_OK(Put(Target(false), kNew));
  EXPECT_EQ(Held(Path("c")), kNew);
}

// Before the save, or while it goes on.
TEST_F(ForeignTargetTest, WhatStaysAsItIs) {
  const auto stays = [&](const ForeignTarget& target, const char* why,
                         const std::function<void()>& make) {
    for (const bool meanwhile : {false, true}) {
      fs::remove_all(Path("c"));
      std::optional<SaveSession> session;
      if (meanwhile) ASSERT_OK(Begin(target, kNew, &session));
      make();
      const Status told = meanwhile ? CommitForeign(&*session, target, "f")
                                    : Begin(target, kNew, &session);
      EXPECT_EQ(told.kind(), ErrorKind::kConflict) << told.ToString();
      EXPECT_EQ(told.file(), Path("c"));
      EXPECT_NE(told.message().find(why), std::string::npos) << told.message();
      session.reset();
      ExpectNoStaging();
      EXPECT_NE(Held(Path("c")), kNew);
    }
  };
  const auto file = [&] { WriteText(Path("c"), kOld); };
  const auto text = [&] { WriteText(Path("c"), "old"); };
  const auto folder = [&] { fs::create_directory(Path("c")); };
  const auto full = [&] {
    folder();
    WriteText(Path("c/f"), kOld);
  };
  const auto link = [&] { fs::create_symlink("x", Path("c")); };
  stays(Target(true, false), "overwrite=True", file);
  stays(Target(true), "no file of torch.save", text);
  stays(Target(true), "no file of torch.save", folder);
  stays(Target(true), "no file of torch.save", link);
  stays(Target(false), "another directory", full);
  stays(Target(false), "another directory", file);
  stays(Target(false), "another directory", link);
}

TEST_F(ForeignTargetTest, OneAtATime) {
  ForBoth([&](bool is_file) {
    std::optional<SaveSession> first, second;
    ASSERT_OK(Begin(Target(is_file), kNew, &first));
    EXPECT_EQ(Begin(Target(is_file), kThird, &second).kind(),
              ErrorKind::kConflict);
    EXPECT_EQ(BeginSave(Path("c"), true).status().kind(), ErrorKind::kConflict);
    const auto places = StagedPlaces(Path("c"));
    ASSERT_OK(places.status());
    ASSERT_EQ(places->size(), 1u);
    EXPECT_TRUE(places->at(0).in_use);
    ASSERT_OK(CommitForeign(&*first, Target(is_file), "f"));
    EXPECT_EQ(Held(Path("c")), kNew);
  });
}

// As on two nodes whose file system keeps all locks to each.
TEST_F(ForeignTargetTest, NoLockHolds) {
  ForBoth([&](bool is_file) {
    std::optional<SaveSession> first, second;
    ASSERT_OK(Begin(Target(is_file), kNew, &first));
    ReleaseLocks(root(), /*flocks_only=*/false);
    ASSERT_OK(Begin(Target(is_file), kThird, &second));
    const Status told = CommitForeign(&*first, Target(is_file), "f");
    EXPECT_EQ(told.kind(), ErrorKind::kConflict) << told.ToString();
    EXPECT_EQ(Held(Path("c")), "");
    first.reset();
    ASSERT_OK(CommitForeign(&*second, Target(is_file), "f"));
    EXPECT_EQ(Held(Path("c")), kThird);
  });
}

#ifdef TORCH_CKPT_FAULTS

// It stops behind its last look, and another one begins.
TEST_F(ForeignTargetTest, SupersededBehindTheLastLook) {
  ForBoth([&](bool is_file) {
    std::optional<SaveSession> first, second;
    ASSERT_OK(Begin(Target(is_file), kNew, &first));
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (site.path2 != Path("c")) return {};
      SetFaultHook(nullptr);
      ReleaseLocks(root(), /*flocks_only=*/false);
      EXPECT_OK(Begin(Target(is_file), kThird, &second));
      return {};
    });
    const Status told = CommitForeign(&*first, Target(is_file), "f");
    EXPECT_EQ(told.kind(), ErrorKind::kConflict) << told.ToString();
    first.reset();
    ASSERT_OK(CommitForeign(&*second, Target(is_file), "f"));
    EXPECT_EQ(Held(Path("c")), kThird);
  });
}

TEST_F(ForeignTargetTest, ALostAnswerIsNoFailure) {
  ForBoth([&](bool is_file) {
    for (const int error : {ENOENT, EIO}) {
      fs::remove_all(Path("c"));
      bool lost = false;
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        if (site.path2 != Path("c")) return {};
        fs::rename(site.path, site.path2);
        lost = true;
        return {.sys_errno = error};
      });
      EXPECT_OK(Put(Target(is_file), kNew));
      SetFaultHook(nullptr);
      EXPECT_TRUE(lost);
      EXPECT_EQ(Held(Path("c")), kNew);
    }
  });
}

TEST_F(ForeignTargetTest, NoRenameKnowsNotToReplace) {
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "renameat2" ? EINVAL : 0};
  });
  EXPECT_OK(Put(Target(true, /*overwrite=*/false), kNew));
  EXPECT_EQ(Held(Path("c")), kNew);
}

// Whatever a crash of the machine leaves is the old one or the new one, and the
// next save finds its way.
void ForeignTargetTest::CheckCrashes(bool is_file, bool existing) {
  at_ = "live/";
  fs::remove_all(Path("live"));
  fs::create_directory(Path("live"));
  if (existing && is_file) WriteText(Path("live/c"), kOld);
  if (existing && !is_file) fs::create_directory(Path("live/c"));
  const std::string old = existing && is_file ? kOld : "";
  crash::Recorder recorder(Path("live"));
  const Status put = Put(Target(is_file), kNew);
  recorder.Stop();
  ASSERT_OK(put);
  std::set<std::string> done, seen;
  for (size_t prefix = 0; prefix <= recorder.ops().size(); ++prefix) {
    const bool whole = prefix == recorder.ops().size();
    if (whole) done.clear();
    crash::CrashStates(recorder, prefix)
        .ForEach(Path("state"), &done, [&](const std::string& path) {
          const std::string held = Held(path + "/c");
          seen.insert(held);
          EXPECT_TRUE(held == kNew || (held == old && !whole))
              << "after " << prefix << " operations: " << held;
          if (!is_file) fs::remove_all(path + "/c");
          EXPECT_OK(Put({path + "/c", is_file, true}, kThird));
          EXPECT_EQ(Held(path + "/c"), kThird);
          EXPECT_EQ(Names(path), std::vector<std::string>{"c"});
        });
    if (HasFailure()) return;
  }
  EXPECT_EQ(seen, (std::set<std::string>{old, kNew}));
}

TEST_F(ForeignTargetTest, ACrashLeavesTheOldOrTheNew) {
  for (const bool existing : {false, true}) {
    CheckCrashes(/*is_file=*/true, existing);
    CheckCrashes(/*is_file=*/false, existing);
  }
}

#endif

}  // namespace
}  // namespace torch_ckpt
