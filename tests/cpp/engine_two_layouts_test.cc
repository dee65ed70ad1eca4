// A save whose final files and shards lie in subdirectories, each of which can
// be opened as well.
#include <cerrno>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "engine/read/verify_job.h"
#include "final_test_util.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;
using Contents = std::map<std::string, std::string>;

class TwoLayoutsTest : public EngineTest {
 protected:
  FinalSettings Settings() const {
    FinalSettings settings;
    settings.naming.number_single = false;
    settings.naming.subdirectory = "model";
    settings.files.max_bytes = 200;
    settings.shards = GridPieces("state.a", state_, {2, 1});
    settings.of_shards.object = kObject;
    settings.of_shards.below = "state/";
    return settings;
  }
  std::vector<Piece> Pieces() const {
    std::vector<Piece> pieces = GridPieces("a", a_, {2, 1});
    pieces.push_back(WholePiece("b", b_, 1));
    return pieces;
  }
  Status Save() { return SaveFinal(Path("c"), Pieces(), Settings()).status(); }
  void ExpectHolds(const std::string& path, const Contents& contents) {
    const auto read = ReadAll(path);
    ASSERT_OK(read.status());
    EXPECT_EQ(*read, contents) << path;
  }
  static Status Verify(const std::string& path) {
    TC_ASSIGN_OR_RETURN(const CheckpointPtr checkpoint, OpenCheckpoint(path));
    Job job;
    return RunVerifyJob(checkpoint, {}, &job).status();
  }
  static void FlipLastByte(const std::string& path) {
    std::string text = ReadText(path);
    text.back() = static_cast<char>(text.back() ^ 1);
    WriteText(path, text);
  }

  const std::string kObject = "{\"step\": 7}";
  const Array a_ = MakeArray(Dtype::kF32, {30, 4}, 1);
  const Array b_ = MakeArray(Dtype::kI8, {9}, 2);
  const Array state_ = MakeArray(Dtype::kF32, {10, 4}, 3);
  const Contents model_ = {{"a", a_.bytes}, {"b", b_.bytes}};
  const Contents rest_ = {{"state.a", state_.bytes}, {"step", kObject}};
  Contents All() const {
    Contents all = model_;
    all.insert(rest_.begin(), rest_.end());
    return all;
  }
};

TEST_F(TwoLayoutsTest, EachIsWholeByItself) {
  ASSERT_OK(Save());
  EXPECT_EQ(Names(Path("c")),
            (std::vector<std::string>{"model", "state", "torch_ckpt.catalog",
                                      "torch_ckpt.json"}));
  const std::vector<std::string> files = {"model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors",
                                          "model.safetensors.index.json"};
  EXPECT_EQ(Names(Path("c/model")), files);
  EXPECT_EQ(Names(Path("c/state")),
            (std::vector<std::string>{ObjectFileName(0), ShardFileName(0, 1, 1),
                                      ShardFileName(1, 1, 1)}));
  const std::string index = ReadText(Path("c/model/") + files[2]);
  EXPECT_NE(index.find("\"a\": \"model-00001"), index.npos) << index;
  EXPECT_EQ(index.find("state.a"), index.npos) << index;

  ExpectHolds(Path("c"), All());
  ExpectHolds(Path("c/model"), model_);
  ExpectHolds(Path("c/state"), rest_);
  const auto whole = OpenCheckpoint(Path("c"));
  const auto model = OpenCheckpoint(Path("c/model"));
  const auto state = OpenCheckpoint(Path("c/state"));
  for (const auto& each : {whole, model, state}) {
    ASSERT_OK(each.status());
    EXPECT_EQ((*each)->source(), kManifestSource);
    EXPECT_EQ((*each)->save_id(), (*whole)->save_id());
    EXPECT_OK((*each)->file_set()->CheckFiles());
  }
  EXPECT_EQ((*whole)->format(), kOurFormat);
  EXPECT_EQ((*model)->format(), kWholeFormat);
  EXPECT_EQ((*state)->format(), kOurFormat);
  EXPECT_NE((*model)->identity(), (*whole)->identity());
  EXPECT_EQ((*model)->path(), Path("c/model"));
  std::vector<std::string> names;
  for (const ManifestFile& file : (*model)->files()) names.push_back(file.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, files);
}

TEST_F(TwoLayoutsTest, ItIsFoundThroughALinkAndNotElsewhere) {
  ASSERT_OK(Save());
  fs::create_directory_symlink(Path("c/model"), Path("link"));
  const auto linked = OpenCheckpoint(Path("link"));
  ASSERT_OK(linked.status());
  EXPECT_EQ((*linked)->source(), kManifestSource);
  ExpectHolds(Path("link"), model_);
  // A copy is whole by itself, and one in its place is not the one that was
  // saved.
  fs::copy(Path("c/model"), Path("copy"));
  const auto copied = OpenCheckpoint(Path("copy"));
  ASSERT_OK(copied.status());
  EXPECT_NE((*copied)->source(), kManifestSource);
  fs::copy(Path("c/model"), Path("c/other"));
  const auto beside = OpenCheckpoint(Path("c/other"));
  ASSERT_OK(beside.status());
  EXPECT_NE((*beside)->source(), kManifestSource);
  fs::copy(Path("c/state"), Path("shards"));
  EXPECT_EQ(OpenCheckpoint(Path("shards")).status().kind(),
            ErrorKind::kIncomplete);
}

TEST_F(TwoLayoutsTest, DamageIsOfItsOwnDirectory) {
  ASSERT_OK(Save());
  const std::string shard = "c/state/" + ShardFileName(1, 1, 1);
  FlipLastByte(Path(shard));
  EXPECT_OK(Verify(Path("c/model")));
  for (const std::string path : {"c", "c/state"}) {
    const Status status = Verify(Path(path));
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
    EXPECT_EQ(status.file(), Path(shard));
  }
  ASSERT_OK(Save());
  fs::remove(Path("c/model/model-00002-of-00002.safetensors"));
  const Status missing = ReadAll(Path("c/model")).status();
  EXPECT_EQ(missing.kind(), ErrorKind::kIncomplete) << missing.ToString();
  ExpectHolds(Path("c/state"), rest_);
  // Who cannot read the manifest cannot know what is whole.
  FlipLastByte(Path("c/torch_ckpt.json"));
  const Status damaged = OpenCheckpoint(Path("c/state")).status();
  EXPECT_EQ(damaged.kind(), ErrorKind::kCorrupt) << damaged.ToString();
  EXPECT_TRUE(damaged.file().ends_with("torch_ckpt.json")) << damaged.file();
}

TEST_F(TwoLayoutsTest, NothingIsSavedIntoAPart) {
  ASSERT_OK(Save());
  const Status saved = SaveAll(Path("c/model"), Pieces()).status();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  EXPECT_EQ(saved.file(), Path("c/model"));
  EXPECT_OK(Verify(Path("c")));
  EXPECT_EQ(Names(Path("c/model")).size(), 3u);
}

TEST_F(TwoLayoutsTest, OneReplacesTheOther) {
  ASSERT_OK(SaveAll(Path("c"), Pieces()).status());
  ASSERT_OK(Save());
  ExpectHolds(Path("c"), All());
  EXPECT_EQ(Names(Path("c")).size(), 4u);
  WriteText(Path("c/model/notes"), "mine");
  ASSERT_OK(SaveAll(Path("c"), Pieces()).status());
  ExpectHolds(Path("c"), model_);
  EXPECT_EQ(Names(Path("c/model")), (std::vector<std::string>{"notes"}));
  EXPECT_FALSE(fs::exists(Path("c/state")));
  // What a damaged manifest still says of subdirectories goes too.
  ASSERT_OK(Save());
  FlipLastByte(Path("c/torch_ckpt.json"));
  ASSERT_OK(SaveAll(Path("c"), Pieces()).status());
  ExpectHolds(Path("c"), model_);
  EXPECT_FALSE(fs::exists(Path("c/state")));
  EXPECT_EQ(Names(Path("c/model")), (std::vector<std::string>{"notes"}));
}

// Readers of the subdirectory would find the other one first.
TEST_F(TwoLayoutsTest, ACheckpointInASubdirectoryIsInTheWay) {
  ASSERT_OK(SaveAll(Path("c/model"), Pieces()).status());
  Status saved = Save();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  EXPECT_EQ(saved.file(), Path("c/model/torch_ckpt.json"));
  ExpectHolds(Path("c/model"), model_);
  fs::remove_all(Path("c/model"));
  fs::create_directories(Path("c/state"));
  WriteText(Path("c/state/.metadata"), "stock's");
  saved = Save();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  EXPECT_EQ(saved.file(), Path("c/state/.metadata"));
}

// The merge keeps shards, whose tensors are in its own files then.
TEST_F(TwoLayoutsTest, WhatAConsolidationHasLeftIsNoCheckpoint) {
  ASSERT_OK(Save());
  ASSERT_OK(Merge(Path("c"), Path("c")).status());
  ExpectHolds(Path("c"), All());
  const Status left = OpenCheckpoint(Path("c/state")).status();
  EXPECT_EQ(left.kind(), ErrorKind::kIncomplete) << left.ToString();
  EXPECT_EQ(left.file(), Path("c/state"));
}

TEST_F(TwoLayoutsTest, WhatWouldHideAFileIsRefused) {
  fs::create_directories(Path("c/model"));
  fs::create_directories(Path("c/state"));
  WriteForeign(Path("c/model/model.safetensors"),
               {ForeignBox("a", a_, Box::Whole(a_.shape))});
  Status saved = Save();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  EXPECT_EQ(saved.file(), Path("c/model/model.safetensors"));
  // In the directory itself nobody looks for what lies below it.
  fs::rename(Path("c/model/model.safetensors"), Path("c/model.safetensors"));
  ASSERT_OK(Save());
  ExpectHolds(Path("c/model"), model_);
  ASSERT_OK(Save());
  fs::copy(Path("c/state/" + ShardFileName(1, 1, 1)),
           Path("c/state/" + ShardFileName(6, 1, 1)));
  saved = Save();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  EXPECT_EQ(saved.file(), Path("c/state/" + ShardFileName(6, 1, 1)));
}

TEST_F(TwoLayoutsTest, WhatIsNoDirectoryIsInTheWay) {
  for (const std::string name : {"model", "state"}) {
    for (const bool link : {false, true}) {
      fs::remove_all(Path("c"));
      fs::create_directories(Path("c"));
      fs::create_directories(Path("outside"));
      if (link) {
        fs::create_directory_symlink(Path("outside"), Path("c/" + name));
      } else {
        WriteText(Path("c/" + name), "mine");
      }
      const Status saved = Save();
      EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
      EXPECT_EQ(saved.file(), Path("c/" + name));
      EXPECT_EQ(Names(Path("c")), (std::vector<std::string>{name}));
    }
  }
  EXPECT_TRUE(fs::is_empty(Path("outside")));
}

#ifdef TORCH_CKPT_FAULTS

// A commit that is not carried out: the new files of a part are in staging.
TEST_F(TwoLayoutsTest, APartIsReadByTheJournal) {
  ASSERT_OK(Save());
  FinalSettings settings = Settings();
  settings.shards = GridPieces("state.b", a_, {2, 1});
  int renames = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool into = std::string(site.op) == "renameat" &&
                      site.path2.starts_with(Path("c/"));
    const bool below = into && (site.path2.starts_with(Path("c/model/")) ||
                                site.path2.starts_with(Path("c/state/")));
    if (below && ++renames > 2) return {.sys_errno = EIO};
    return {};
  });
  const Status saved = SaveFinal(Path("c"), Pieces(), settings).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(saved.sys_errno(), EIO) << saved.ToString();
  ExpectHolds(Path("c/model"), model_);
  ExpectHolds(Path("c/state"), {{"state.b", a_.bytes}, {"step", kObject}});
  EXPECT_OK(RecoverDirectory(Path("c")).status());
  ExpectHolds(Path("c/state"), {{"state.b", a_.bytes}, {"step", kObject}});
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
