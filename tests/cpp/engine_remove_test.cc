// Removing a checkpoint, and whatever a crash of the machine leaves of it.
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "engine/remove.h"
#include "engine_crash_states.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

class RemoveTest : public EngineTest {
 protected:
  std::vector<Piece> Pieces() { return GridPieces("a", array_, {3, 1}); }

  const Array array_ = MakeArray(Dtype::kF32, {30, 4}, 1);
};

TEST_F(RemoveTest, SaysWhatItHasRemovedAndWhatIsLeft) {
  ASSERT_OK(SaveAll(Path("t"), Pieces()).status());
  const std::vector<std::string> names = Names(Path("t"));
  auto removed = RemoveCheckpoint(Path("t"));
  ASSERT_OK(removed.status());
  EXPECT_EQ(removed->removed.back(), "torch_ckpt.json");
  EXPECT_EQ(removed->removed.size(), names.size());
  EXPECT_TRUE(removed->directory);
  EXPECT_TRUE(Names(Path("")).empty());

  ASSERT_OK(SaveAll(Path("t"), Pieces()).status());
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
TEST_F(RemoveTest, ACrashLeavesItWholeOrIncomplete) {
  fs::create_directory(Path("live"));
  SaveSettings settings;
  // Two directories, so that one of them may go and the other one not.
  settings.below = "one/two/";
  ASSERT_OK(SaveAll(Path("live/t"), Pieces(), settings).status());
  crash::Recorder recorder(Path("live"));
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
        EXPECT_TRUE(again->directory);
      } else {
        ++gone;
        EXPECT_EQ(again.status().kind(), ErrorKind::kIncomplete)
            << again.status().ToString();
        // Without a manifest nothing may be left that readers could take.
        if (fs::exists(at)) {
          for (const auto& entry : fs::recursive_directory_iterator(at)) {
            EXPECT_NE(entry.path().extension(), ".safetensors");
          }
        }
      }
      EXPECT_OK(SaveAll(at, Pieces()).status());
      EXPECT_OK(ReadAll(at).status());
    });
    if (HasFailure()) return;
  }
  EXPECT_GT(whole, 0);
  EXPECT_GT(gone, 0);
  EXPECT_GT(states, 10);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
