// Savers on two nodes of a file system that does not carry every lock from one
// to the other.
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "engine/commit/commit.h"
#include "engine_commit_test_util.h"

namespace torch_ckpt {
namespace {

class NodesTest : public CommitTest {
 protected:
  // A save that has written its files and is about to commit.
  struct Saver {
    std::optional<SaveSession> session;
    CommitRequest request;
  };
  Status Begin(const Array& a, Saver* saver) {
    TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(Path("c"), true));
    saver->session.emplace(std::move(session));
    return WriteRanks(saver->session->place().path, Pieces(a), {},
                      &saver->request);
  }
  static Status Commit(Saver* saver) {
    return CommitSave(&*saver->session, saver->request).status();
  }
  // For a target that is absent and for one that holds a checkpoint.
  void ForBoth(const std::function<void(bool existing)>& test) {
    for (const bool existing : {false, true}) {
      std::filesystem::remove_all(Path("c"));
      if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
      test(existing);
      ExpectNoStaging();
      if (HasFailure()) return;
    }
  }
  const Array third_ = MakeArray(Dtype::kF32, {10, 4}, 3);
};

// NFS keeps flock to the node, and carries the other lock.
TEST_F(NodesTest, FlockOfTheNode) {
  ForBoth([&](bool) {
    Saver first, second;
    ASSERT_OK(Begin(new_, &first));
    ReleaseLocks(root(), /*flocks_only=*/true);
    EXPECT_EQ(Begin(third_, &second).kind(), ErrorKind::kConflict);
    EXPECT_EQ(RecoverDirectory(Path("c")).status().kind(),
              ErrorKind::kConflict);
    ASSERT_OK(Commit(&first));
    ExpectHolds(new_);
  });
}

// No lock is carried: the later one wins, and the earlier one is told.
TEST_F(NodesTest, NoLockHolds) {
  ForBoth([&](bool existing) {
    Saver first, second;
    ASSERT_OK(Begin(new_, &first));
    ReleaseLocks(root(), /*flocks_only=*/false);
    ASSERT_OK(Begin(third_, &second));
    const Status told = Commit(&first);
    EXPECT_EQ(told.kind(), ErrorKind::kConflict) << told.ToString();
    first.session.reset();
    if (existing) ExpectHolds(old_);
    ASSERT_OK(Commit(&second));
    ExpectHolds(third_);
  });
}

// It hears the same of what it writes after that.
TEST_F(NodesTest, ASupersededSaveIsToldWhenItWrites) {
  ForBoth([&](bool) {
    Saver first, second;
    ASSERT_OK(Begin(new_, &first));
    ReleaseLocks(root(), /*flocks_only=*/false);
    ASSERT_OK(Begin(third_, &second));
    const Status told = WriteRanks(first.session->place().path, Pieces(new_),
                                   {}, &first.request);
    EXPECT_EQ(told.kind(), ErrorKind::kConflict) << told.ToString();
    first.session.reset();
    ASSERT_OK(Commit(&second));
    ExpectHolds(third_);
  });
}

// The other way round, the earlier one ends while the later one writes.
TEST_F(NodesTest, NoLockHoldsAndTheEarlierOneGivesUp) {
  ForBoth([&](bool) {
    Saver first, second;
    ASSERT_OK(Begin(new_, &first));
    ReleaseLocks(root(), /*flocks_only=*/false);
    ASSERT_OK(Begin(third_, &second));
    first.session.reset();
    ASSERT_OK(Commit(&second));
    ExpectHolds(third_);
  });
}

// A save that began before the other one was to be seen, and commits after it:
// what was acknowledged stays.
TEST_F(NodesTest, ACommitThatNobodySawComing) {
  ForBoth([&](bool existing) {
    Saver save;
    ASSERT_OK(Begin(new_, &save));
    std::filesystem::remove_all(Path("d"));
    ASSERT_OK(SaveAll(Path("d"), Pieces(third_)).status());
    if (existing) {
      const std::string stage = Path("c/") + std::string(kStageSuffix);
      std::filesystem::rename(stage, Path("d/") + std::string(kStageSuffix));
      std::filesystem::remove_all(Path("c"));
    }
    std::filesystem::rename(Path("d"), Path("c"));
    EXPECT_EQ(Commit(&save).kind(), ErrorKind::kConflict);
    save.session.reset();
    ExpectHolds(third_);
    std::filesystem::remove_all(Path("c/") + std::string(kStageSuffix));
  });
}

#ifdef TORCH_CKPT_FAULTS

// A client may remember the file of a lock that was given back on another node:
// it can be neither made nor opened for a while.
TEST_F(NodesTest, TheFileOfALockIsRememberedForAWhile) {
  ForBoth([&](bool) {
    int opens = 0, sleeps = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "sleep") {
        ++sleeps;
        return {.skip = true};
      }
      if (op != "openat" || !site.path.ends_with("/.lock") || opens == 10) {
        return {};
      }
      return {.sys_errno = ++opens % 2 == 1 ? EEXIST : ENOENT};
    });
    const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
    SetFaultHook(nullptr);
    ASSERT_OK(saved);
    EXPECT_EQ(sleeps, 5);
    ExpectHolds(new_);
  });
}

// At every call of the earlier one's commit the later one begins, without any
// lock between them: one of them is told, and what was acknowledged is there.
TEST_F(NodesTest, TheOtherOneBeginsAnywhereInTheCommit) {
  for (const bool renames : {true, false}) {
    ForBoth([&](bool existing) {
      int first_wins = 0, second_wins = 0;
      bool done = false;
      for (int nth = 1; !done; ++nth) {
        std::filesystem::remove_all(Path("c"));
        if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
        Saver first, second;
        ASSERT_OK(Begin(new_, &first));
        std::atomic<int> calls{0};
        std::atomic<bool> inside{false};
        Status begun;
        SetFaultHook([&](const FaultSite& site) -> FaultAction {
          if (!inside && ++calls == nth) {
            inside = true;
            ReleaseLocks(root(), /*flocks_only=*/false);
            begun = Begin(third_, &second);
            inside = false;
          }
          const bool no = !renames && std::string(site.op) == "renameat2";
          return {.sys_errno = no ? EINVAL : 0};
        });
        const Status committed = Commit(&first);
        SetFaultHook(nullptr);
        done = calls < nth;
        first.session.reset();
        if (committed.ok()) {
          ++first_wins;
          ExpectHolds(new_);
        }
        Status last = begun;
        if (last.ok() && second.session) last = Commit(&second);
        second.session.reset();
        if (last.ok() && !done) {
          ++second_wins;
          ExpectHolds(third_);
        } else if (committed.ok()) {
          ExpectHolds(new_);
        } else if (existing) {
          ExpectHolds(old_);
        }
        EXPECT_TRUE(committed.ok() || last.ok())
            << nth << committed.ToString() << last.ToString();
        // The next one finds nothing in its way.
        ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
        ExpectHolds(old_);
        ExpectNoStaging();
        if (HasFailure()) return;
      }
      EXPECT_GT(first_wins, 0);
      EXPECT_GT(second_wins, 0);
    });
  }
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
