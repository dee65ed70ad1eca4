// Whatever a crash of the machine leaves of a save (engine_crash_states.h) is
// the old checkpoint or the new one.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/commit/rank_parts.h"
#include "engine_crash_states.h"
#include "final_test_util.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;
using crash::CrashStates;
using crash::Op;
using crash::Recorder;

using Contents = std::map<std::string, std::string>;

class CrashTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    fs::create_directory(Path("live"));
  }

  std::string Live(const std::string& name) const {
    return Path("live/" + name);
  }

  std::vector<Piece> OldPieces() { return GridPieces("a", old_, {3, 1}); }
  std::vector<Piece> NewPieces() {
    std::vector<Piece> pieces = GridPieces("a", new_, {2, 1});
    pieces.push_back(WholePiece("b", extra_, 1));
    return pieces;
  }
  Contents NewContents() const {
    return {{"a", new_.bytes}, {"b", extra_.bytes}, {"step", kObject}};
  }
  SaveSettings Settings() const {
    SaveSettings settings;
    settings.object = kObject;
    settings.output.workers = 1;
    return settings;
  }

  // Runs `save` on `target` (below live/) and checks every state. `old`: what
  // the directory held; nothing when it held no checkpoint. `others`: names in
  // the target that no save may touch.
  void Check(const std::string& target, const std::optional<Contents>& old,
             const Contents& fresh, const std::function<Status()>& save,
             const std::vector<std::string>& others = {}) {
    Recorder recorder(Path("live"));
    recorder_ = &recorder;
    const Status saved = save();
    recorder.Stop();
    ASSERT_OK(saved);
    std::set<std::string> done;
    bool saw_old = false, saw_new = false;
    for (size_t prefix = 0; prefix <= recorder.ops().size(); ++prefix) {
      const bool whole = prefix == recorder.ops().size();
      // What is acknowledged is durable: no state counts as seen for that.
      if (whole) done.clear();
      CrashStates states(recorder, prefix);
      states.ForEach(Path("state"), &done, [&](const std::string& path) {
        ++states_;
        const std::string at = path + "/" + target;
        auto read = ReadAll(at);
        const bool is_new = read.ok() && *read == fresh;
        const bool is_old =
            old ? read.ok() && *read == *old
                : read.status().kind() == ErrorKind::kIncomplete;
        const bool is_middle = middle_ && read.ok() && *read == *middle_;
        saw_old = saw_old || is_old;
        saw_new = saw_new || is_new;
        if (!(is_new || ((is_old || is_middle) && !whole))) {
          Fail(recorder, prefix, path, read.status());
          return;
        }
        for (const auto& [name, contents] : parts_) {
          const std::string below = at + "/" + name;
          // Before the replay it may not be there yet.
          if (!is_new || !fs::exists(below)) continue;
          const auto part = ReadAll(below);
          if (!part.ok() || *part != contents) {
            Fail(recorder, prefix, path, part.status());
            return;
          }
        }
        if (states_ % 2 == 0) {
          const auto recovered = RecoverDirectory(at);
          const auto again = ReadAll(at);
          if (!recovered.ok() || again.ok() != read.ok() ||
              (read.ok() && *again != *read)) {
            Fail(recorder, prefix, path, recovered.status());
            return;
          }
        }
        const Status next =
            SaveAll(at, GridPieces("c", third_, {1, 2})).status();
        auto last = ReadAll(at);
        if (!next.ok() || !last.ok() ||
            *last != Contents{{"c", third_.bytes}}) {
          Fail(recorder, prefix, path, next.ok() ? last.status() : next);
          return;
        }
        std::vector<std::string> expected = {
            ShardFileName(0, 1, 1), ShardFileName(1, 1, 1),
            "torch_ckpt.catalog", "torch_ckpt.json"};
        for (const std::string& other : others) {
          if (fs::exists(at + "/" + other)) expected.push_back(other);
        }
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(Names(at), expected) << "prefix " << prefix;
        const std::string parent = fs::path(at).parent_path().string();
        for (const std::string& name : Names(parent)) {
          EXPECT_FALSE(name.ends_with(kStageSuffix)) << "prefix " << prefix;
        }
      });
      if (HasFailure()) return;
    }
    EXPECT_TRUE(saw_old);
    EXPECT_TRUE(saw_new);
    EXPECT_GT(states_, 10);
    RecordProperty("states", states_);
  }

  void Fail(const Recorder& recorder, size_t prefix, const std::string& path,
            const Status& status) {
    if (HasFailure()) return;  // the first one says enough
    std::string tree;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      tree += "  " + fs::relative(entry.path(), path).string();
      if (entry.is_regular_file()) {
        tree += " " + std::to_string(entry.file_size());
      }
      tree += "\n";
    }
    std::string last;
    for (size_t i = prefix < 4 ? 0 : prefix - 4; i < prefix; ++i) {
      const Op& op = recorder.ops()[i];
      last += "  " + std::to_string(op.kind) + " id " + std::to_string(op.id);
      for (const auto& entry : op.removed) last += " -" + entry.first.second;
      for (const auto& entry : op.added) last += " +" + entry.first.second;
      last += "\n";
    }
    ADD_FAILURE() << "after " << prefix << " of " << recorder.ops().size()
                  << " operations, the last ones\n"
                  << last << status.ToString() << "\nin\n"
                  << tree;
  }

  const std::string kObject = "{\"step\": 7}";
  const Array old_ = MakeArray(Dtype::kF32, {30, 4}, 1);
  const Array new_ = MakeArray(Dtype::kF32, {30, 4}, 2);
  const Array extra_ = MakeArray(Dtype::kI8, {9}, 3);
  const Array third_ = MakeArray(Dtype::kF32, {3, 4}, 4);
  int states_ = 0;
  std::optional<Contents> middle_;  // may be found on the way
  // Of the new checkpoint, by its subdirectories.
  std::map<std::string, Contents> parts_;
  Recorder* recorder_ = nullptr;  // while Check runs the save
};

TEST_F(CrashTest, FreshTarget) {
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, EmptyTarget) {
  fs::create_directory(Live("t"));
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ParentsThatAreMissing) {
  Check("x/y/z/t", std::nullopt, NewContents(), [&] {
    return SaveAll(Live("x/y/z/t"), NewPieces(), Settings()).status();
  });
}

TEST_F(CrashTest, OneMissingParent) {
  Check("x/t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("x/t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ExistingCheckpoint) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  WriteText(Live("t/config.json"), "{}");
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); },
        {"config.json"});
}

TEST_F(CrashTest, SubdirectoriesThatComeAndGo) {
  SaveSettings settings;
  settings.below = "one/two/";
  ASSERT_OK(SaveAll(Live("t"), OldPieces(), settings).status());
  settings = Settings();
  settings.below = "one/three/";
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), settings).status(); });
}

TEST_F(CrashTest, AFreshTargetWithSubdirectories) {
  SaveSettings settings = Settings();
  settings.below = "one/two/";
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), settings).status(); });
}

// Two ranks that write into final files, one of whose tensors is gathered.
TEST_F(CrashTest, FinalFiles) {
  FinalSettings settings;
  settings.output.workers = 1;
  settings.gathered = {"a"};
  const auto save = [&] {
    return SaveFinal(Live("t"), NewPieces(), settings).status();
  };
  const Contents fresh = {{"a", new_.bytes}, {"b", extra_.bytes}};
  Check("t", std::nullopt, fresh, save);
  fs::remove_all(Live("t"));
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  Check("t", Contents{{"a", old_.bytes}}, fresh, save);
}

// Final files and shards, each in a subdirectory, take the place of a plain
// save and give way to one.
TEST_F(CrashTest, TwoLayouts) {
  FinalSettings settings;
  settings.output.workers = 1;
  settings.naming.subdirectory = "model";
  settings.shards = GridPieces("state", new_, {2, 1});
  settings.of_shards = Settings();
  settings.of_shards.below = "state/";
  const auto save = [&] {
    return SaveFinal(Live("t"), NewPieces(), settings).status();
  };
  Contents two = NewContents();
  two["state"] = new_.bytes;
  parts_["model"] = {{"a", new_.bytes}, {"b", extra_.bytes}};
  parts_["state"] = {{"state", new_.bytes}, {"step", kObject}};
  Check("t", std::nullopt, two, save);
  fs::remove_all(Live("t"));
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  Check("t", Contents{{"a", old_.bytes}}, two, save);
  parts_.clear();
  Check("t", two, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, OtherFilesButNoCheckpoint) {
  fs::create_directory(Live("t"));
  WriteText(Live("t/config.json"), "{}");
  Check("t", std::nullopt, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); },
        {"config.json"});
}

// Whoever made the target for us need not have synced it.
TEST_F(CrashTest, TargetMadeJustBefore) {
  Check("t", std::nullopt, NewContents(),
        [&] {
          fs::create_directory(Live("t"));
          WriteText(Live("t/config.json"), "{}");
          return SaveAll(Live("t"), NewPieces(), Settings()).status();
        },
        {"config.json"});
}

// Names of stock shards are ours too: they are replaced one by one.
TEST_F(CrashTest, ForeignCheckpoint) {
  fs::create_directory(Live("t"));
  for (const Piece& piece : GridPieces("a", old_, {2, 1})) {
    WriteForeign(Live("t/" + ShardFileName(piece.rank, 1, 1)),
                 {ForeignBox("a", old_, piece.box)});
  }
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

TEST_F(CrashTest, ConsolidationIntoAnExistingDirectory) {
  ASSERT_OK(SaveAll(Path("in"), NewPieces(), Settings()).status());
  ASSERT_OK(SaveAll(Path("in2"), OldPieces()).status());
  MergeSettings settings;
  settings.output.workers = 1;
  ASSERT_OK(Merge(Path("in2"), Live("t"), settings).status());
  settings.ranks = 2;
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return Merge(Path("in"), Live("t"), settings).status(); });
}

TEST_F(CrashTest, ConsolidationInPlace) {
  ASSERT_OK(SaveAll(Live("t"), NewPieces(), Settings()).status());
  MergeSettings settings;
  settings.output.workers = 1;
  Check("t", NewContents(), NewContents(),
        [&] { return Merge(Live("t"), Live("t"), settings).status(); });
}

// Somebody fills the target while a first save into it goes on.
TEST_F(CrashTest, TargetFilledMeanwhile) {
  Check("t", std::nullopt, NewContents(),
        [&]() -> Status {
          TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(Live("t"), true));
          CommitRequest request;
          TC_RETURN_IF_ERROR(WriteRanks(session.place().path, NewPieces(),
                                        Settings(), &request));
          fs::create_directory(Live("t"));
          WriteText(Live("t/config.json"), "{}");
          return CommitSave(&session, request).status();
        },
        {"config.json"});
}

// Killed after its commit point, which nobody has synced; another process
// replays it; then the power fails.
TEST_F(CrashTest, KilledReplayedThenPowerLost) {
  for (const bool by_save : {false, true}) {
    // At the sync of the commit point, and in the middle of the replay.
    for (const int calls : {1, 8}) {
      fs::remove_all(Live("t"));
      ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
      states_ = 0;
      Contents fresh = NewContents();
      if (by_save) fresh = {{"c", third_.bytes}, {"step", kObject}};
      // By a save, each of three may be found.
      middle_ = by_save ? std::optional(NewContents()) : std::nullopt;
      Check("t", Contents{{"a", old_.bytes}}, fresh, [&]() -> Status {
        int after = 0;
        recorder_->KillAt([&](const FaultSite& site) {
          if (after > 0) return ++after > calls;
          if (std::string(site.op) == "renameat" &&
              site.path2.ends_with("/committed")) {
            after = 1;
          }
          return false;
        });
        EXPECT_FALSE(SaveAll(Live("t"), NewPieces(), Settings()).ok());
        EXPECT_TRUE(recorder_->Revive());
        if (by_save) {
          return SaveAll(Live("t"), GridPieces("c", third_, {2, 1}), Settings())
              .status();
        }
        return RecoverDirectory(Live("t")).status();
      });
      if (HasFailure()) return;
    }
  }
}

// A commit whose replay failed half way is carried on by the next save, which
// may itself be cut off.
TEST_F(CrashTest, ReplayOfAnEarlierCommit) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  int renames = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool into = std::string(site.op) == "renameat" &&
                      site.path2.starts_with(Live("t/shard"));
    return {.sys_errno = into && ++renames == 2 ? EIO : 0};
  });
  EXPECT_EQ(SaveAll(Live("t"), OldPieces(), Settings()).status().sys_errno(),
            EIO);
  SetFaultHook(nullptr);
  EXPECT_EQ(renames, 2);
  Check("t", Contents{{"a", old_.bytes}, {"step", kObject}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

// What a first save that died has left beside a target that is filled since.
TEST_F(CrashTest, StagingBesideTheTarget) {
  ASSERT_OK(SaveAll(Live("t"), OldPieces()).status());
  fs::create_directory(Live(".t" + std::string(kStageSuffix)));
  WriteText(Live(".t" + std::string(kStageSuffix) + "/x"), "x");
  Check("t", Contents{{"a", old_.bytes}}, NewContents(),
        [&] { return SaveAll(Live("t"), NewPieces(), Settings()).status(); });
}

// Without collectives: two ranks commit one after the other.
TEST_F(CrashTest, PartsOfTwoRanks) {
  Check("t", std::nullopt, NewContents(), [&]() -> Status {
    for (const int64_t rank : {0, 1}) {
      TC_ASSIGN_OR_RETURN(
          PartSession session,
          BeginPart(Live("t"), {rank, 2, std::string(32, 'a'), 0}));
      std::vector<Piece> pieces = NewPieces();
      std::erase_if(pieces, [&](const Piece& p) { return p.rank != rank; });
      SaveSettings settings = Settings();
      if (rank > 0) settings.object.clear();
      CommitRequest request;
      TC_RETURN_IF_ERROR(
          WriteRanks(session.path(), pieces, settings, &request));
      TC_RETURN_IF_ERROR(CommitPart(&session, request).status());
    }
    return {};
  });
}

}  // namespace
}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
