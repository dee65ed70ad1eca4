// Removing a checkpoint, and whatever a crash of the machine leaves of it.
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "engine/upkeep/remove.h"
#include "engine_commit_test_util.h"
#include "engine_crash_states.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

class RemoveTest : public CommitTest {
 protected:
  std::vector<Piece> Whole() { return GridPieces("a", array_, {3, 1}); }

  const Array array_ = MakeArray(Dtype::kF32, {30, 4}, 1);
};

TEST_F(RemoveTest, SaysWhatItHasRemovedAndWhatIsLeft) {
  ASSERT_OK(SaveAll(Path("t"), Whole()).status());
  const std::vector<std::string> names = Names(Path("t"));
  auto removed = RemoveCheckpoint(Path("t"));
  ASSERT_OK(removed.status());
  EXPECT_EQ(removed->removed.back(), "torch_ckpt.json");
  EXPECT_EQ(removed->removed.size(), names.size());
  EXPECT_TRUE(removed->directory);
  EXPECT_TRUE(Names(root()).empty());

  ASSERT_OK(SaveAll(Path("t"), Whole()).status());
  WriteText(Path("t/config.json"), "{}");
  removed = RemoveCheckpoint(Path("t"));
  ASSERT_OK(removed.status());
  EXPECT_FALSE(removed->directory);
  EXPECT_EQ(removed->left, std::vector<std::string>{"config.json"});
  EXPECT_EQ(RemoveCheckpoint(Path("t")).status().kind(),
            ErrorKind::kIncomplete);
}

#ifdef TORCH_CKPT_FAULTS

// No state is a checkpoint of which something is missing and that readers take.
// With `killed`, the removal is killed at that rename or rmdir and begun again.
class CrashedRemoveTest : public RemoveTest,
                          public ::testing::WithParamInterface<int> {};

TEST_P(CrashedRemoveTest, LeavesItWholeOrIncomplete) {
  const int killed = GetParam();
  fs::create_directory(Path("live"));
  SaveSettings settings;
  // Two directories, so that one of them may go and the other one not.
  settings.below = "one/two/";
  ASSERT_OK(SaveAll(Path("live/t"), Whole(), settings).status());
  WriteText(Path("live/t/one/notes"), "mine");
  crash::Recorder recorder(Path("live"));
  int unlinks = 0;
  if (killed > 0) {
    recorder.KillAt([&](const FaultSite& site) {
      const std::string op = site.op;
      return (op == "renameat" || op == "rmdir") &&
             site.path.find("/one/") != std::string::npos &&
             ++unlinks == killed;
    });
    EXPECT_FALSE(RemoveCheckpoint(Path("live/t")).ok());
    EXPECT_TRUE(recorder.Revive());
  }
  const Status removed = RemoveCheckpoint(Path("live/t")).status();
  recorder.Stop();
  ASSERT_OK(removed);
  std::set<std::string> done;
  int whole = 0, gone = 0, states = 0;
  for (size_t prefix = 0; prefix <= recorder.ops().size(); ++prefix) {
    const bool all = prefix == recorder.ops().size();
    if (all) done.clear();  // what is acknowledged is durable
    crash::CrashStates crashed(recorder, prefix);
    crashed.ForEach(Path("state"), &done, [&](const std::string& path) {
      ++states;
      const std::string at = path + "/t";
      const auto read = ReadAll(at);
      if (read.ok()) {
        ++whole;
        EXPECT_FALSE(all);
        EXPECT_EQ(*read,
                  (std::map<std::string, std::string>{{"a", array_.bytes}}));
      } else {
        EXPECT_EQ(read.status().kind(), ErrorKind::kIncomplete)
            << read.status().ToString();
      }
      const auto again = RemoveCheckpoint(at);
      if (again.ok()) {
        EXPECT_EQ(again->left, std::vector<std::string>{"one"});
      } else {
        ++gone;
        EXPECT_EQ(again.status().kind(), ErrorKind::kIncomplete)
            << again.status().ToString();
      }
      // Without a manifest nothing is left that readers could take.
      for (const auto& entry : fs::recursive_directory_iterator(at)) {
        EXPECT_NE(entry.path().extension(), ".safetensors") << prefix;
      }
      EXPECT_EQ(ReadText(at + "/one/notes"), "mine");
      EXPECT_OK(SaveAll(at, Whole()).status());
      EXPECT_OK(ReadAll(at).status());
    });
    if (HasFailure()) return;
  }
  EXPECT_GT(whole, 0);
  EXPECT_GT(gone, 0);
  EXPECT_GT(states, 10);
}

INSTANTIATE_TEST_SUITE_P(Unlinks, CrashedRemoveTest,
                         ::testing::Values(0, 1, 2, 4));

// What another node commits while locks do not reach it is not removed.
TEST_F(RemoveTest, ASaveThatGoesAheadIsKept) {
  ASSERT_OK(SaveAll(Path("t"), Whole()).status());
  const Array other = MakeArray(Dtype::kF32, {30, 4}, 2);
  bool done = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    // The names of the session are in place, the manifest is not read yet.
    if (!done && site.op == std::string("openat") && site.path == Path("t") &&
        fs::exists(Path("t/.torch_ckpt-stage/save_id"))) {
      done = true;
      ReleaseLocks(root(), /*flocks_only=*/false);
      EXPECT_OK(SaveAll(Path("t"), GridPieces("b", other, {2, 1})).status());
    }
    return {};
  });
  const Status removed = RemoveCheckpoint(Path("t")).status();
  SetFaultHook(nullptr);
  EXPECT_TRUE(done);
  EXPECT_EQ(removed.kind(), ErrorKind::kConflict) << removed.ToString();
  EXPECT_EQ(ReadAll(Path("t"))->at("b"), other.bytes);
}

// The same of one that it could not see coming, right before it commits: T is
// another one by then, or the names of the place say that another one has
// begun.
TEST_F(RemoveTest, LooksOnceMoreBeforeItCommits) {
  const Array other = MakeArray(Dtype::kF32, {30, 4}, 2);
  for (const bool committed : {true, false}) {
    fs::remove_all(Path("t"));
    fs::remove_all(Path("d"));
    ASSERT_OK(SaveAll(Path("t"), Whole()).status());
    ASSERT_OK(SaveAll(Path("d"), GridPieces("a", other, {3, 1})).status());
    bool done = false;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (done || !site.path.ends_with("/commit.json")) return {};
      done = true;
      if (committed) {
        for (const std::string& name : Names(Path("d"))) {
          fs::rename(Path("d/" + name), Path("t/" + name));
        }
      } else {
        WriteText(Path("t/" + std::string(kStageSuffix) + "/save_id"),
                  std::string(32, 'f'));
      }
      return {};
    });
    const Status removed = RemoveCheckpoint(Path("t")).status();
    SetFaultHook(nullptr);
    EXPECT_TRUE(done);
    EXPECT_EQ(removed.kind(), ErrorKind::kConflict) << removed.ToString();
    const auto read = ReadAll(Path("t"));
    ASSERT_OK(read.status());
    EXPECT_EQ(read->at("a"), committed ? other.bytes : array_.bytes);
  }
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
