// Saves whose system calls fail, and file systems that lack some.
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <string>
#include <utility>

#include "engine/commit.h"
#include "engine_commit_test_util.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

// Every call of an overwriting save fails once, in each of several ways.
TEST_F(CommitTest, AnErrorOfAnyCallLeavesOldOrNew) {
  for (const int error : {EIO, ENOSPC, EACCES}) {
    bool survived = false;
    for (int nth = 1; !survived; ++nth) {
      ASSERT_LT(nth, 1000);
      std::filesystem::remove_all(Path("c"));
      ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      int calls = 0;
      std::mutex mutex;
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        std::lock_guard<std::mutex> lock(mutex);
        // A read that the page cache cannot serve is tried again by other
        // means, and a failed close of what was only read is no failure.
        if (std::string(site.op) == "preadv2" ||
            std::string(site.op) == "close") {
          return {};
        }
        return {.sys_errno = ++calls == nth ? error : 0};
      });
      const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
      SetFaultHook(nullptr);
      survived = calls < nth;
      if (survived) EXPECT_OK(saved);
      if (!saved.ok()) {
        EXPECT_EQ(saved.sys_errno(), error) << nth << saved.ToString();
        EXPECT_NE(saved.file(), "") << nth;
      }
      auto all = ReadAll(Path("c"));
      ASSERT_OK(all.status());
      EXPECT_TRUE(all->at("a") == new_.bytes ||
                  (!saved.ok() && all->at("a") == old_.bytes));
      ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      ExpectHolds(old_);
      ExpectNoStaging();
    }
  }
}

// While the journal stands it is the manifest, wherever the files are.
TEST_F(CommitTest, ReadersDuringAJournal) {
  bool survived = false;
  int read_new = 0;
  for (int nth = 1; !survived; ++nth) {
    std::filesystem::remove_all(Path("c"));
    ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
    int calls = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      const bool counts = op == "renameat" || op == "unlinkat";
      return {.sys_errno = counts && ++calls == nth ? EIO : 0};
    });
    SaveSettings settings;
    settings.object = "{\"step\": 2}";
    const Status saved = SaveAll(Path("c"), Pieces(new_), settings).status();
    SetFaultHook(nullptr);
    survived = saved.ok();
    const bool journal = std::filesystem::exists(
        Path("c/") + std::string(kStageSuffix) + "/commit.json");
    auto checkpoint = OpenCheckpoint(Path("c"));
    ASSERT_OK(checkpoint.status());
    auto all = ReadAll(Path("c"));
    ASSERT_OK(all.status());
    if (journal || survived) {
      ++read_new;
      EXPECT_EQ(all->at("a"), new_.bytes);
      EXPECT_EQ(all->at("step"), settings.object);
    }
    // A reader that opened it under the journal reads on after the replay.
    EXPECT_EQ(*RecoverDirectory(Path("c")), journal);
    EXPECT_EQ(*ReadBox(*checkpoint, "a", Box::Whole(old_.shape)), all->at("a"));
    ExpectNoStaging();
  }
  EXPECT_GT(read_new, 4);
}

// As a mounted object store: refused before anything is written.
TEST_F(CommitTest, FileSystemsThatCannotSave) {
  for (const auto& refused :
       {std::pair{"pwrite", EINVAL}, std::pair{"pwrite", EOPNOTSUPP},
        std::pair{"renameat", ENOSYS}, std::pair{"renameat", EOPNOTSUPP}}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool hit = std::string(site.op) == refused.first;
      return {.sys_errno = hit ? refused.second : 0};
    });
    const Status begun = BeginSave(Path("c"), true).status();
    SetFaultHook(nullptr);
    EXPECT_EQ(begun.kind(), ErrorKind::kUnsupported) << begun.ToString();
    EXPECT_NE(begun.message().find("out of order"), std::string::npos);
    EXPECT_TRUE(Names(root()).empty()) << refused.first;
  }
}

// A network file system may do a rename and lose the answer.
TEST_F(CommitTest, ALostAnswerIsNoFailure) {
  bool lost = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) != "renameat2" || site.path2 != Path("c")) {
      return {};
    }
    std::filesystem::rename(site.path, site.path2);
    lost = true;
    return {.sys_errno = ENOENT};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  EXPECT_OK(saved);
  EXPECT_TRUE(lost);
  ExpectHolds(new_);
  ExpectNoStaging();
}

// Nor is what is the checkpoint now taken for a staging directory to clean.
TEST_F(CommitTest, ALostAnswerThatIsNotNoticed) {
  bool lost = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (lost) return {};
    if (std::string(site.op) != "renameat2" || site.path2 != Path("c")) {
      return {};
    }
    std::filesystem::rename(site.path, site.path2);
    lost = true;
    // And the look at the names fails too.
    SetFaultHook([](const FaultSite& next) -> FaultAction {
      SetFaultHook(nullptr);
      EXPECT_STREQ(next.op, "fstatat");
      return {.sys_errno = EIO};
    });
    return {.sys_errno = ENOENT};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(saved.sys_errno(), EIO) << saved.ToString();
  ExpectHolds(new_);
  ExpectNoStaging();
}

// The lock is there as long as the staging directory has its name.
TEST_F(CommitTest, LockByFileUntilTheRename) {
  int renames = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) == "renameat2" && site.path2 == Path("c")) {
      ++renames;
      EXPECT_EQ(BeginSave(Path("c"), true).status().kind(),
                ErrorKind::kConflict);
    }
    return {.sys_errno = std::string(site.op) == "flock" ? EOPNOTSUPP : 0};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  ASSERT_OK(saved);
  EXPECT_EQ(renames, 1);
  ExpectHolds(new_);
  ExpectNoStaging();
  EXPECT_FALSE(std::filesystem::exists(Path("c/lock")));
}

// File systems without flock: a file is the lock, and it never survives.
TEST_F(CommitTest, LockByFile) {
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "flock" ? EOPNOTSUPP : 0};
  });
  for (int round = 0; round < 2; ++round) {
    {
      auto first = BeginSave(Path("c"), true);
      ASSERT_OK(first.status());
      EXPECT_EQ(BeginSave(Path("c"), true).status().kind(),
                ErrorKind::kConflict);
    }
    ExpectNoStaging();
    ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
    ExpectHolds(new_);
    ExpectNoStaging();
    EXPECT_FALSE(std::filesystem::exists(Path("c/lock")));
  }
}

}  // namespace
}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
