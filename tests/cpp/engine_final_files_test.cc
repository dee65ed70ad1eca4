// Saves straight into final files: what every rank writes there, what the
// coordinator puts in place, and what it refuses.
#include <cstdio>
#include <map>
#include <mutex>

#include "base/checked.h"
#include "final_test_util.h"

namespace torch_ckpt {
namespace {

class FinalFilesTest : public EngineDiskTest {
 protected:
  void SetUp() override {
    EngineDiskTest::SetUp();
    // Three rows over four ranks and rows that end inside of blocks.
    large_ = MakeArray(Dtype::kF32, {97, 33, 71}, 1);
    columns_ = MakeArray(Dtype::kBF16, {50, 64}, 2);
    small_ = MakeArray(Dtype::kU8, {13}, 3);
    pieces_ = GridPieces("large", large_, {4, 1, 1});
    for (const Piece& piece : GridPieces("columns", columns_, {1, 4})) {
      pieces_.push_back(piece);
    }
    pieces_.push_back(WholePiece("small", small_, 2));
  }

  // A session with final files in staging, and what all ranks have written.
  void Begin(const std::vector<Piece>& planned) {
    auto begun = BeginSave(Path("c"), true);
    ASSERT_OK(begun.status());
    session_ = std::make_unique<SaveSession>(std::move(begun).value());
    auto list =
        StageFinalFiles(session_->directory(),
                        FinalTensorsOf(planned, {"columns"}), {}, {}, true);
    ASSERT_OK(list.status());
    list_ = std::move(list).value();
  }
  Result<RankFinals> Write(int64_t rank, const std::vector<Piece>& pieces) {
    return WriteFinalRank(session_->place().path, rank, pieces);
  }
  void WriteAll() {
    for (int64_t rank = 0; rank < 4; ++rank) {
      auto finals = Write(rank, pieces_);
      ASSERT_OK(finals.status());
      ranks_.push_back(std::move(finals).value());
    }
  }
  Status Assemble(const OutputOptions& options = {}) {
    Job job;
    return RunAssembleJob(session_->directory(), list_, ranks_, options, &job)
        .status();
  }

  Array large_, columns_, small_;
  std::vector<Piece> pieces_;
  std::unique_ptr<SaveSession> session_;
  FinalFiles list_;
  std::vector<RankFinals> ranks_;
};

#ifdef TORCH_CKPT_FAULTS
// Of a file whose tensors have no bytes the header is all there is, and nobody
// writes, and syncs, the file after that.
TEST_F(FinalFilesTest, TheHeaderOfAFileWithoutBytesIsSynced) {
  const Array empty = MakeArray(Dtype::kF32, {0, 3}, 1);
  std::mutex mutex;
  std::map<std::string, std::string> last;  // call on a staged file
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    const std::lock_guard<std::mutex> lock(mutex);
    const bool data = site.path.find(".safetensors.") != site.path.npos &&
                      !site.path.ends_with(".header") &&
                      site.path.find(".index.") == site.path.npos;
    if (data && (op == "pwrite" || op == "fsync")) last[site.path] = op;
    return {};
  });
  const Status saved =
      SaveFinal(Path("c"), {WholePiece("empty", empty)}).status();
  SetFaultHook(nullptr);
  ASSERT_OK(saved);
  EXPECT_EQ(last.size(), 1u);
  for (const auto& [path, op] : last) EXPECT_EQ(op, "fsync") << path;
}
#endif

TEST_F(FinalFilesTest, AreTheBytesThatAMergeWrites) {
  for (const bool direct : {true, false}) {
    FinalSettings settings;
    settings.gathered = {"columns"};
    settings.output.direct_io = direct;
    ASSERT_OK(SaveFinal(Path("final"), pieces_, settings).status());
    ASSERT_OK(SaveAll(Path("sharded"), pieces_).status());
    ASSERT_OK(Merge(Path("sharded"), Path("merged")).status());
    auto final = ReadAll(Path("final"));
    auto merged = ReadAll(Path("merged"));
    ASSERT_OK(final.status());
    ASSERT_OK(merged.status());
    EXPECT_TRUE(*final == *merged);
    const std::string name = FinalFileName(1, 1);
    const std::string a = ReadText(Path("final/" + name));
    const std::string b = ReadText(Path("merged/" + name));
    ASSERT_EQ(a.size(), b.size());
    // All but the id in the header.
    EXPECT_TRUE(a.substr(kDataAlignment) == b.substr(kDataAlignment));
    EXPECT_EQ(Names(Path("final")), Names(Path("merged")));
  }
}

TEST_F(FinalFilesTest, RanksShareNoBlock) {
  Begin(pieces_);
  WriteAll();
  std::set<uint64_t> blocks;
  for (const RankFinals& rank : ranks_) {
    for (const WrittenFinal& file : rank.files) {
      for (const WrittenRange& range : file.ranges) {
        const uint64_t end = RoundUp(range.bytes.end, 4096);
        for (uint64_t at = range.bytes.begin; at < end; at += 4096) {
          EXPECT_TRUE(blocks.insert(at).second) << at;
        }
      }
    }
  }
  EXPECT_GT(blocks.size(), 200u);
}

TEST_F(FinalFilesTest, FilesByMappingAndBySize) {
  FinalSettings by_mapping;
  by_mapping.files.mapping = {{{"large", 3}, {"columns", 1}, {"small", 3}}};
  ASSERT_OK(SaveFinal(Path("c"), pieces_, by_mapping).status());
  EXPECT_EQ(
      Names(Path("c")),
      (std::vector<std::string>{
          FinalFileName(1, 3), FinalFileName(3, 3), std::string(kIndexName),
          std::string(kCatalogName), std::string(kManifestName)}));
  FinalSettings by_size;
  by_size.files.max_bytes = columns_.bytes.size() + small_.bytes.size();
  by_size.naming = {"adapter_model", false};
  // In place of what stood there.
  ASSERT_OK(SaveFinal(Path("c"), pieces_, by_size).status());
  EXPECT_EQ(Names(Path("c")),
            (std::vector<std::string>{
                "adapter_model-00001-of-00002.safetensors",
                "adapter_model-00002-of-00002.safetensors",
                "adapter_model.safetensors.index.json",
                std::string(kCatalogName), std::string(kManifestName)}));
  by_size.files.max_bytes = 0;
  ASSERT_OK(SaveFinal(Path("c"), pieces_, by_size).status());
  EXPECT_EQ(Names(Path("c")),
            (std::vector<std::string>{"adapter_model.safetensors",
                                      std::string(kCatalogName),
                                      std::string(kManifestName)}));
  auto all = ReadAll(Path("c"));
  ASSERT_OK(all.status());
  EXPECT_TRUE(all->at("large") == large_.bytes);
}

TEST_F(FinalFilesTest, ATensorThatTheMappingLacksIsRefused) {
  FinalSettings settings;
  settings.files.mapping = {{{"large", 1}, {"small", 1}}};
  const Status status = SaveFinal(Path("c"), pieces_, settings).status();
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(status.tensor(), "columns");
  EXPECT_TRUE(Names(root()).empty());
}

TEST_F(FinalFilesTest, WhatTheStagedHeaderDoesNotSayIsRefusedByTheRank) {
  Begin(pieces_);
  const Array other_shape = MakeArray(Dtype::kU8, {14}, 3);
  const Array other_dtype = MakeArray(Dtype::kI8, {13}, 3);
  for (const Array* array : {&other_shape, &other_dtype}) {
    const Status status = Write(2, {WholePiece("small", *array, 2)}).status();
    EXPECT_EQ(status.kind(), ErrorKind::kConflict);
    EXPECT_EQ(status.tensor(), "small");
    EXPECT_EQ(status.file(), FinalFileName(1, 1));
    EXPECT_NE(status.message().find("U8 (13)"), std::string::npos);
  }
  const Status status = Write(2, {WholePiece("new", small_, 2)}).status();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_EQ(status.tensor(), "new");
}

TEST_F(FinalFilesTest, WithoutStagedFilesThereIsNothingToWriteInto) {
  auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  const Status status =
      WriteFinalRank(session->place().path, 0, pieces_).status();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
}

TEST_F(FinalFilesTest, ARankThatIsMissingLeavesAHoleThatNamesTheTensor) {
  for (size_t missing = 0; missing < 4; ++missing) {
    Begin(pieces_);
    ranks_.clear();
    WriteAll();
    ranks_.erase(ranks_.begin() + static_cast<std::ptrdiff_t>(missing));
    const Status status = Assemble();
    EXPECT_EQ(status.kind(), ErrorKind::kIncomplete) << status.ToString();
    EXPECT_NE(status.tensor(), "");
    session_.reset();
  }
}

TEST_F(FinalFilesTest, BytesOfTwoRanksAreAConflict) {
  Begin(pieces_);
  WriteAll();
  // Another rank with the same rows.
  std::vector<Piece> again = pieces_;
  for (Piece& piece : again) piece.rank += 4;
  auto finals = Write(4, again);
  ASSERT_OK(finals.status());
  ranks_.push_back(*finals);
  const Status status = Assemble();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
  // And of the tensors that are gathered alone.
  ranks_.pop_back();
  for (WrittenSpill& spill : finals->spills) spill.bytes.clear();
  for (WrittenFinal& file : finals->files) file.ranges.clear();
  ranks_.push_back(*finals);
  const Status boxes = Assemble();
  EXPECT_EQ(boxes.kind(), ErrorKind::kConflict) << boxes.ToString();
  EXPECT_EQ(boxes.tensor(), "columns");
}

TEST_F(FinalFilesTest, AHeaderThatIsNotTheCoordinatorsIsAConflict) {
  Begin(pieces_);
  WriteAll();
  ranks_[1].files[0].id = NewId();
  const Status status = Assemble();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_NE(status.message().find("rank 1"), std::string::npos);
}

TEST_F(FinalFilesTest, SpillsThatWereDamagedAreFound) {
  Begin(pieces_);
  WriteAll();
  const std::string path =
      session_->place().path + "/" + ranks_[1].spills[0].file.staged;
  std::string text = ReadText(path);
  text[text.size() / 2] ^= 1;
  WriteText(path, text);
  const Status status = Assemble();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
}

TEST_F(FinalFilesTest, ASpillThatIsGoneOrCutIsFound) {
  for (const bool gone : {true, false}) {
    Begin(pieces_);
    ranks_.clear();
    WriteAll();
    const std::string path =
        session_->place().path + "/" + ranks_[1].spills[0].file.staged;
    if (gone) {
      ASSERT_EQ(std::remove(path.c_str()), 0);
    } else {
      WriteText(path, ReadText(path).substr(1));
    }
    const Status status = Assemble();
    EXPECT_EQ(status.kind(),
              gone ? ErrorKind::kIncomplete : ErrorKind::kCorrupt)
        << status.ToString();
    EXPECT_EQ(status.file(), path);
    session_.reset();
  }
}

TEST_F(FinalFilesTest, ABoxThatIsNotInItsSpillIsFound) {
  Begin(pieces_);
  WriteAll();
  std::vector<SpillBox>& boxes = ranks_[1].spills[0].boxes;
  ASSERT_FALSE(boxes.empty());
  for (const uint64_t at : {ranks_[1].spills[0].file.bytes, ~uint64_t{0}}) {
    boxes[0].at = at;
    const Status status = Assemble();
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
    EXPECT_EQ(status.tensor(), boxes[0].tensor);
    EXPECT_EQ(status.file(), ranks_[1].spills[0].file.staged);
  }
}

// Fresh memory is slow, and what ranks leave is little mostly.
TEST_F(FinalFilesTest, FewBytesThatAreLeftTakeTheMemoryOfOneWorker) {
  Begin(pieces_);
  WriteAll();
  Arena::Process().Trim();
  OutputOptions options;
  options.workers = 8;
  ASSERT_OK(Assemble(options));
  EXPECT_LT(Arena::Process().Stats().mapped, 4 * kPieceBytes);
}

TEST_F(FinalFilesTest, AListThatWasDamagedIsFound) {
  Begin(pieces_);
  const std::string path = session_->place().path + "/final_files";
  const std::string good = ReadText(path);
  for (size_t at = 0; at < good.size(); at += 7) {
    std::string text = good;
    text[at] ^= 1;
    WriteText(path, text);
    EXPECT_EQ(ReadFinalFiles(session_->directory()).status().kind(),
              ErrorKind::kCorrupt);
  }
}

}  // namespace
}  // namespace torch_ckpt
