// Commits of so many files that these are placed side by side.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "engine/commit/commit.h"
#include "engine/commit/each_file.h"
#include "engine/upkeep/remove.h"
#include "engine_commit_test_util.h"

namespace torch_ckpt {
namespace {

TEST(ForEachFile, FewAreDoneInOrderByTheCaller) {
  std::vector<size_t> done;
  const auto caller = std::this_thread::get_id();
  ASSERT_OK(ForEachFile(31, [&](size_t i) -> Status {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    done.push_back(i);
    return {};
  }));
  ASSERT_EQ(done.size(), 31u);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_OK(ForEachFile(0, [](size_t) { return Internal("none"); }));
}

#ifdef TORCH_CKPT_FAULTS

class ManyFilesTest : public CommitTest {
 protected:
  static constexpr int64_t kFiles = 96;

  // One file for each row.
  Status Save(const Array& array, const std::string& below = "") {
    SaveSettings settings;
    settings.below = below;
    settings.output.sync = false;  // of what is no part of the commit
    return SaveAll(Path("c"), GridPieces("a", array, {kFiles, 1}), settings)
        .status();
  }

  const Array many_old_ = MakeArray(Dtype::kF32, {kFiles, 4}, 1);
  const Array many_new_ = MakeArray(Dtype::kF32, {kFiles, 4}, 2);
};

// The most calls of each kind that are going on at once while `work` runs.
template <class Work>
std::map<std::string, int> MostAtOnce(const Work& work) {
  std::mutex mutex;
  std::map<std::string, int> now, most;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    if (op != "renameat" && op != "unlinkat" && op != "statx") return {};
    {
      const std::lock_guard lock(mutex);
      most[op] = std::max(most[op], ++now[op]);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(mutex);
    --now[op];
    return {};
  });
  work();
  SetFaultHook(nullptr);
  return most;
}

TEST_F(ManyFilesTest, ArePlacedSideBySide) {
  auto most = MostAtOnce([&] { ASSERT_OK(Save(many_old_)); });
  EXPECT_GE(most["renameat"], 4) << "a first save";
  most = MostAtOnce([&] { ASSERT_OK(Save(many_new_)); });
  EXPECT_GE(most["renameat"], 4) << "over another one";
  EXPECT_GE(most["statx"], 4) << "what is replaced is looked at before";
  ExpectHolds(many_new_);
  ExpectNoStaging();
  most = MostAtOnce([&] { ASSERT_OK(RemoveCheckpoint(Path("c")).status()); });
  EXPECT_GE(most["renameat"], 4) << "a removal moves them away";
  EXPECT_GE(most["unlinkat"], 4) << "and removes them";
}

// From some call of the commit on every one fails, as if the process had died
// there; or only that one does.
TEST_F(ManyFilesTest, AnErrorOrTheEndAtAnyCallLeavesOldOrNew) {
  std::mt19937 random(7);
  std::atomic<int> calls = 0;
  ASSERT_OK(Save(many_old_));
  SetFaultHook([&](const FaultSite&) -> FaultAction {
    ++calls;
    return {};
  });
  ASSERT_OK(Save(many_new_));
  SetFaultHook(nullptr);
  const int all = calls;
  int old = 0, fresh = 0;
  for (int round = 0; round < 24; ++round) {
    const bool existing = round % 2 == 0, dies = round % 4 < 2;
    std::filesystem::remove_all(Path("c"));
    if (existing) ASSERT_OK(Save(many_old_));
    // The last third of a save is its commit.
    const int at =
        all - static_cast<int>(random() % static_cast<unsigned>(all * 2 / 3));
    calls = 0;
    SetFaultHook([&](const FaultSite&) -> FaultAction {
      const int number = ++calls;
      return {.sys_errno = number == at || (dies && number > at) ? EIO : 0};
    });
    const Status saved = Save(many_new_);
    SetFaultHook(nullptr);
    SCOPED_TRACE((dies ? "dies at call " : "an error at call ") +
                 std::to_string(at) + ": " + saved.ToString());
    const auto there = ReadAll(Path("c"));
    if (saved.ok() || there.ok()) {
      ASSERT_OK(there.status());
      const bool is_new = there->at("a") == many_new_.bytes;
      ++(is_new ? fresh : old);
      if (saved.ok()) {
        EXPECT_TRUE(is_new);
      }
      EXPECT_TRUE(is_new || (existing && there->at("a") == many_old_.bytes));
    } else {
      EXPECT_FALSE(existing) << there.status().ToString();
    }
    ASSERT_OK(Save(many_old_));
    ExpectHolds(many_old_);
    ExpectNoStaging();
  }
  EXPECT_GT(old, 0);
  EXPECT_GT(fresh, 0);
}

// A removal that is cut off leaves a manifest as long as it leaves a file.
TEST_F(ManyFilesTest, ARemovalTakesTheManifestLast) {
  ASSERT_OK(Save(many_old_));
  std::mutex mutex;
  std::vector<std::string> moved;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::lock_guard lock(mutex);
    if (site.op == std::string("renameat") &&
        site.path2.find("/gone.") != std::string::npos) {
      moved.push_back(site.path);
    }
    return {};
  });
  const Status removed = RemoveCheckpoint(Path("c")).status();
  SetFaultHook(nullptr);
  ASSERT_OK(removed);
  const auto manifest =
      std::find(moved.begin(), moved.end(), Path("c/torch_ckpt.json"));
  ASSERT_NE(manifest, moved.end());
  EXPECT_GE(manifest - moved.begin(), kFiles);
  EXPECT_FALSE((manifest + 1)->starts_with(Path("c/shard")));
}

// Files of one subdirectory make it once, and leave none behind.
TEST_F(ManyFilesTest, BelowSubdirectories) {
  ASSERT_OK(Save(many_old_, "x/y/"));
  ASSERT_OK(Save(many_new_, "z/"));
  ExpectHolds(many_new_);
  EXPECT_FALSE(std::filesystem::exists(Path("c/x")));
  ExpectNoStaging();
}

// Where each call takes a millisecond, as over a network. Of so many files as
// ./dev campaign has, what a commit takes is a figure that it prints.
TEST_F(ManyFilesTest, AtAMillisecondACall) {
  const int64_t files = Full() ? 8192 : kFiles;
  const Array array = MakeArray(Dtype::kF32, {files, 4}, 1);
  for (const char* what : {"a first save", "a save over another one"}) {
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    SaveSettings settings;
    settings.output.sync = false;
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path,
                         GridPieces("a", array, {files, 1}), settings,
                         &request));
    std::atomic<int> calls = 0;
    SetFaultHook([&](const FaultSite&) -> FaultAction {
      ++calls;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return {};
    });
    const auto start = std::chrono::steady_clock::now();
    const Status committed = CommitSave(&*session, request).status();
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - start;
    SetFaultHook(nullptr);
    ASSERT_OK(committed);
    if (!Full()) continue;
    std::printf(
        "COMMIT %s of %ld files, a millisecond a call: %.2f s, %d calls\n",
        what, static_cast<long>(files), took.count(), calls.load());
  }
  ExpectHolds(array);
  ExpectNoStaging();
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
