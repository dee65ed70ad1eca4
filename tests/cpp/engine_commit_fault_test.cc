// Saves whose system calls fail, and file systems that lack some.
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <string>
#include <utility>

#include "engine/commit/commit.h"
#include "engine/commit/staged_files.h"
#include "engine_commit_test_util.h"
#include "os/path.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

// Follows a save into c through its calls.
class Phases {
 public:
  explicit Phases(const std::string& target)
      : target_(target), parent_(ParentPath(target)) {}

  // To be called before each call, in order.
  void See(const FaultSite& site) {
    const std::string op = site.op;
    if (synced_) cleaning_ = true;
    if (renamed_ && op == "fsync" && site.path == parent_) synced_ = true;
    if (op == "renameat2" && site.path2 == target_) renamed_ = true;
    // A journal is renamed away when it is carried out.
    if (op == "renameat" && site.path.ends_with("/commit.json")) {
      cleaning_ = true;
    }
  }
  // The commit is through, and all that follows is clean-up.
  bool cleaning() const { return cleaning_; }

 private:
  const std::string target_, parent_;
  bool renamed_ = false, synced_ = false;
  bool cleaning_ = false;
};

// Calls whose failure a save may survive. Any other one, a sync above all, must
// fail it.
bool MayFailUnseen(const FaultSite& site, const Phases& phases,
                   const std::string& parent, int error) {
  const std::string op = site.op;
  // Hints; and a close of what was only read: that of a written file is looked
  // at in engine_write_job_test.cc.
  if (op == "fadvise" || op == "madvise" || op == "close") return true;
  if (phases.cleaning()) return true;
  // Who we are, for the lock's file: "-" where it is not known.
  if (site.path.starts_with("/proc") || site.path.starts_with("/etc")) {
    return true;
  }
  // Tried a second time.
  if (op == "mkdirat" && site.path == parent) return true;
  // A parent that may not be read was made by others, and so was where saves
  // into it stage.
  if (op != "openat" || error != EACCES) return false;
  const std::string stage = "/" + std::string(kStageSuffix);
  return site.path == parent || site.path == parent + stage ||
         site.path.ends_with("/..") || site.path.ends_with("/.." + stage);
}

// Every call of a save fails once, in each of several ways.
TEST_F(CommitTest, AnErrorOfAnyCallLeavesOldOrNew) {
  for (const bool existing : {true, false}) {
    for (const int error : {EIO, ENOSPC, EACCES}) {
      bool survived = false;
      for (int nth = 1; !survived; ++nth) {
        ASSERT_LT(nth, 1000);
        std::filesystem::remove_all(Path("c"));
        if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
        int calls = 0;
        bool unseen = false;
        std::string what;
        Phases phases(Path("c"));
        std::mutex mutex;
        SetFaultHook([&](const FaultSite& site) -> FaultAction {
          std::lock_guard<std::mutex> lock(mutex);
          phases.See(site);
          // A read that the page cache cannot serve is tried again by other
          // means.
          if (std::string(site.op) == "preadv2") return {};
          if (++calls != nth) return {};
          unseen = MayFailUnseen(site, phases, root(), error);
          what = std::string(site.op) + " " + site.path;
          return {.sys_errno = error};
        });
        const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
        SetFaultHook(nullptr);
        survived = calls < nth;
        if (survived) EXPECT_OK(saved);
        EXPECT_TRUE(survived || unseen || !saved.ok()) << nth << " " << what;
        if (!saved.ok() && what.starts_with("ofd_lock") && error == EACCES) {
          EXPECT_EQ(saved.kind(), ErrorKind::kConflict);  // so it says "held"
        } else if (!saved.ok()) {
          EXPECT_EQ(saved.sys_errno(), error) << what << saved.ToString();
          EXPECT_NE(saved.file(), "") << what;
        }
        auto all = ReadAll(Path("c"));
        if (existing || saved.ok()) ASSERT_OK(all.status());
        if (all.ok()) {
          EXPECT_TRUE(all->at("a") == new_.bytes ||
                      (!saved.ok() && all->at("a") == old_.bytes));
        } else {
          EXPECT_EQ(all.status().kind(), ErrorKind::kIncomplete) << what;
        }
        ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
        ExpectHolds(old_);
        ExpectNoStaging();
      }
    }
  }
}

// What is left when the commit is through goes as it can.
TEST_F(CommitTest, ACommitThatCannotCleanUpIsCommitted) {
  for (const bool existing : {true, false}) {
    for (const int error : {EIO, EBUSY, ENOTEMPTY}) {
      std::filesystem::remove_all(Path("c"));
      if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      Phases phases(Path("c"));
      std::mutex mutex;
      int failed = 0;
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        std::lock_guard<std::mutex> lock(mutex);
        phases.See(site);
        if (!phases.cleaning()) return {};
        ++failed;
        return {.sys_errno = error};
      });
      const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
      SetFaultHook(nullptr);
      EXPECT_OK(saved);
      EXPECT_GT(failed, 0);
      ExpectHolds(new_);
      ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      ExpectHolds(old_);
      ExpectNoStaging();
    }
  }
}

// A network file system keeps what is open under another name, and the
// directory with it: the save commits, the next one begins, and a later one
// cleans up.
TEST_F(CommitTest, FilesThatAreOpenStayForAWhile) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) == "rmdir") {
      WriteText(site.path + "/.nfs0001", "x");
    }
    return {};
  });
  for (const Array& a : {new_, old_, new_}) {
    EXPECT_OK(SaveAll(Path("c"), Pieces(a)).status());
    ExpectHolds(a);
  }
  SetFaultHook(nullptr);
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  ExpectHolds(old_);
  ExpectNoStaging();
}

// Somebody makes the target while a first save into it goes on, where no rename
// can refuse to replace.
TEST_F(CommitTest, TargetFilledMeanwhileWithoutRenameFlags) {
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "renameat2" ? EINVAL : 0};
  });
  for (const bool late : {false, true}) {
    std::filesystem::remove_all(Path("c"));
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
    const auto fill = [&] {
      std::filesystem::create_directory(Path("c"));
      WriteText(Path("c/trainer_state.json"), "{}");
    };
    if (!late) fill();
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool no = std::string(site.op) == "renameat2";
      if (no && late && site.path2 == Path("c")) fill();
      return {.sys_errno = no ? EINVAL : 0};
    });
    EXPECT_OK(CommitSave(&*session, request).status());
    ExpectHolds(new_);
    ExpectNoStaging();
    EXPECT_TRUE(std::filesystem::exists(Path("c/trainer_state.json")));
  }
  SetFaultHook(nullptr);
}

// The place is looked for again under its lock: T has come to be since.
TEST_F(CommitTest, TargetMadeBetweenTheLookAndTheLock) {
  bool made = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("flock") && !made) {
      made = true;
      std::filesystem::create_directory(Path("c"));
    }
    return {};
  });
  const Result<SaveSession> session = BeginSave(Path("c"), true);
  SetFaultHook(nullptr);
  ASSERT_OK(session.status());
  EXPECT_TRUE(made);
  EXPECT_FALSE(session->place().fresh);
  EXPECT_EQ(session->place().root, PlaceInside(Path("c")));
  EXPECT_FALSE(std::filesystem::exists(PlaceBeside(Path("c"))));
}

// As /home, which only root may list.
TEST_F(CommitTest, AParentThatCannotBeRead) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool no = std::string(site.op) == "openat" && site.path == root();
    return {.sys_errno = no ? EACCES : 0};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  EXPECT_OK(saved);
  ExpectHolds(new_);
  ExpectNoStaging();
}

// Another node has removed what was open or looked up here.
TEST_F(CommitTest, StaleHandlesAreReplacements) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  int times = 0;
  const auto stale = [&](const std::string& name, int most) {
    times = 0;
    SetFaultHook([&times, name, most](const FaultSite& site) -> FaultAction {
      const bool hit = std::string(site.op) == "openat" &&
                       site.path.ends_with(name) && ++times <= most;
      return {.sys_errno = hit ? ESTALE : 0};
    });
    const Status read = ReadAll(Path("c")).status();
    SetFaultHook(nullptr);
    EXPECT_GT(times, 0) << name;
    return read;
  };
  EXPECT_OK(stale("torch_ckpt.json", 1));
  const Status read = stale("torch_ckpt.json", 1000);
  EXPECT_EQ(read.kind(), ErrorKind::kConflict) << read.ToString();
  EXPECT_NE(read.message().find("being replaced"), std::string::npos)
      << read.ToString();
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
      const bool counts =
          op == "renameat" || op == "renameat2" || op == "unlinkat";
      return {.sys_errno = counts && ++calls == nth ? EIO : 0};
    });
    SaveSettings settings;
    settings.object = "{\"step\": 2}";
    const Status saved = SaveAll(Path("c"), Pieces(new_), settings).status();
    SetFaultHook(nullptr);
    survived = calls < nth;
    const std::string stage = Path("c/") + std::string(kStageSuffix);
    const bool left = std::filesystem::exists(stage);
    const bool journal =
        std::filesystem::exists(stage + "/committed/commit.json");
    auto checkpoint = OpenCheckpoint(Path("c"));
    ASSERT_OK(checkpoint.status());
    auto all = ReadAll(Path("c"));
    ASSERT_OK(all.status());
    if (journal || saved.ok()) {
      ++read_new;
      EXPECT_EQ(all->at("a"), new_.bytes);
      EXPECT_EQ(all->at("step"), settings.object);
    }
    // A reader that opened it under the journal reads on after the replay.
    EXPECT_EQ(*RecoverDirectory(Path("c")), left);
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
      // They can write a small file from its start, as that of the lock is.
      const bool hit = std::string(site.op) == refused.first &&
                       site.path.ends_with("/probe");
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
  for (const bool existing : {false, true}) {
    for (const int error : {ENOENT, EIO}) {
      std::filesystem::remove_all(Path("c"));
      if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      bool lost = false;
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        const std::string op = site.op;
        const bool commits =
            existing ? op == "renameat" && site.path2.ends_with("/committed")
                     : op == "renameat2" && site.path2 == Path("c");
        if (!commits) return {};
        std::filesystem::rename(site.path, site.path2);
        lost = true;
        return {.sys_errno = error};
      });
      const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
      SetFaultHook(nullptr);
      EXPECT_OK(saved);
      EXPECT_TRUE(lost);
      ExpectHolds(new_);
      ExpectNoStaging();
    }
  }
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

bool IsLock(const FaultSite& site) {
  const std::string op = site.op;
  return op == "flock" || op.starts_with("ofd_");
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
    return {.sys_errno = IsLock(site) ? EOPNOTSUPP : 0};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  ASSERT_OK(saved);
  EXPECT_EQ(renames, 1);
  ExpectHolds(new_);
  ExpectNoStaging();
}

// File systems without locks: a file is the lock, and it never survives.
TEST_F(CommitTest, LockByFile) {
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = IsLock(site) ? EOPNOTSUPP : 0};
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
  }
}

// No file of a checkpoint gets in the way of those of the protocol, whatever
// it is called.
TEST_F(CommitTest, ExtrasCalledLikeTheProtocol) {
  for (const bool locks : {true, false}) {
    for (const bool existing : {false, true}) {
      std::filesystem::remove_all(Path("c"));
      if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        return {.sys_errno = IsLock(site) && !locks ? EOPNOTSUPP : 0};
      });
      {
        auto session = BeginSave(Path("c"), true);
        ASSERT_OK(session.status());
        CommitRequest request;
        ASSERT_OK(
            WriteRanks(session->place().path, Pieces(new_), {}, &request));
        for (const std::string& name :
             {std::string("lock"), std::string("save_id"), std::string("probe"),
              std::string("final_files"), std::string("committed"),
              session->save_id()}) {
          auto file = AddStagedFile(session->directory(), name,
                                    FileRole::kExtra, "extra");
          ASSERT_OK(file.status());
          request.files.push_back(*file);
        }
        EXPECT_OK(CommitSave(&*session, request).status());
      }
      SetFaultHook(nullptr);
      ExpectHolds(new_);
      ExpectNoStaging();
      EXPECT_EQ(ReadText(Path("c/lock")), "extra");
      EXPECT_EQ(ReadText(Path("c/save_id")), "extra");
    }
  }
}

}  // namespace
}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
