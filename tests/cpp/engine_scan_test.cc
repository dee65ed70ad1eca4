// Directories that are not ours.
#include "engine/open/scan.h"
#include "engine_test_util.h"
#include "format/safetensors/hf_index.h"

namespace torch_ckpt {
namespace {

class ScanTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    std::filesystem::create_directory(Path("c"));
  }
  std::string In(const std::string& name) const { return Path("c/" + name); }

  void Index(const std::vector<std::pair<std::string, std::string>>& map) {
    HfIndex index;
    index.weight_map = map;
    WriteText(In(std::string(kIndexName)), BuildHfIndex(index));
  }
  // Rows of `a` cut at `cuts`, one stock shard each.
  void Shards(const Array& a, const std::vector<int64_t>& cuts) {
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      const Box box{{cuts[r], 0}, {cuts[r + 1] - cuts[r], a.shape[1]}};
      WriteForeign(In(ShardFileName(static_cast<int64_t>(r), 1, 1)),
                   {ForeignBox("a", a, box)});
    }
  }
  void ExpectError(ErrorKind kind, const std::string& says) {
    const Status status = OpenCheckpoint(Path("c")).status();
    EXPECT_EQ(status.kind(), kind) << status.ToString();
    EXPECT_NE(status.ToString().find(says), std::string::npos)
        << status.ToString();
  }

  const Array a_ = MakeArray(Dtype::kF32, {12, 5}, 1);
  const Array b_ = MakeArray(Dtype::kI8, {3}, 2);
};

ForeignTensor Whole(const std::string& name, const Array& array) {
  return {name, array.dtype, array.shape, array.bytes, std::nullopt};
}

TEST_F(ScanTest, HubDirectoryWithoutMetadata) {
  WriteForeign(In("model.safetensors"), {Whole("a", a_), Whole("b", b_)});
  WriteText(In("config.json"), "{}");
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->source(), "headers");
  EXPECT_FALSE((*checkpoint)->file_set()->has_digests());
  EXPECT_EQ(*ReadBox(*checkpoint, "a", Box::Whole(a_.shape)), a_.bytes);
  const Box box{{3, 1}, {5, 2}};
  EXPECT_EQ(*ReadBox(*checkpoint, "a", box), BoxBytes(a_, box));
}

// Sizes whose product is 1 again, modulo 2^64.
TEST_F(ScanTest, AShapeThatOverflowsIsNoShape) {
  const Array one = MakeArray(Dtype::kI8, {1, 1, 1}, 1);
  ForeignTensor corner = Whole("w", one);
  corner.offsets = Dims{172413803162116, 246348590813044, 114004720083704};
  WriteForeign(In(ShardFileName(0, 1, 1)), {corner});
  ExpectError(ErrorKind::kCorrupt, "impossible");
}

TEST_F(ScanTest, CompleteIndexWinsOverAgreeingShards) {
  WriteForeign(In("model-00001-of-00002.safetensors"), {Whole("a", a_)});
  WriteForeign(In("model-00002-of-00002.safetensors"), {Whole("b", b_)});
  Index({{"a", "model-00001-of-00002.safetensors"},
         {"b", "model-00002-of-00002.safetensors"}});
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->source(), "index");
  Shards(a_, {0, 6, 12});
  checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->source(), "index");
  EXPECT_EQ((*checkpoint)->Placements(0)->size(), 1u);
}

TEST_F(ScanTest, IndexAndShardsThatDisagree) {
  WriteForeign(In("model-00001-of-00001.safetensors"), {Whole("a", a_)});
  Index({{"a", "model-00001-of-00001.safetensors"}});
  const Array other = MakeArray(Dtype::kF32, {14, 5}, 1);
  Shards(other, {0, 6, 14});
  ExpectError(ErrorKind::kConflict, "'a'");
  Shards(MakeArray(Dtype::kI32, {12, 5}, 1), {0, 6, 12});
  ExpectError(ErrorKind::kConflict, "I32");
  WriteForeign(In(ShardFileName(0, 1, 1)), {Whole("stale", b_)});
  WriteForeign(In(ShardFileName(1, 1, 1)), {Whole("stale2", b_)});
  ExpectError(ErrorKind::kConflict, "stale");
}

TEST_F(ScanTest, IndexThatNamesWhatIsNotThere) {
  WriteForeign(In("model-00001-of-00002.safetensors"), {Whole("a", a_)});
  Index({{"a", "model-00001-of-00002.safetensors"},
         {"b", "model-00002-of-00002.safetensors"}});
  ExpectError(ErrorKind::kIncomplete, "model-00002-of-00002");
  // Another data file beside it does not make up for it.
  WriteForeign(In("adapter.safetensors"),
               {Whole("x", MakeArray(Dtype::kF32, {2}, 9))});
  ExpectError(ErrorKind::kIncomplete, "model-00002-of-00002");
  // Shards that hold all of it do.
  std::filesystem::remove(In("adapter.safetensors"));
  std::filesystem::remove(In("model-00001-of-00002.safetensors"));
  Shards(a_, {0, 6, 12});
  WriteForeign(In(ShardFileName(2, 1, 1)), {Whole("b", b_)});
  EXPECT_EQ(ReadAll(Path("c"))->at("a"), a_.bytes);
}

// The same tensors in another dtype are no remedy for a missing file.
TEST_F(ScanTest, AVariantDoesNotMakeUpForAMissingFile) {
  WriteForeign(In("model-00001-of-00002.safetensors"), {Whole("a", a_)});
  Index({{"a", "model-00001-of-00002.safetensors"},
         {"b", "model-00002-of-00002.safetensors"}});
  WriteForeign(In("model.fp16.safetensors"), {Whole("a", a_), Whole("b", b_)});
  ExpectError(ErrorKind::kIncomplete, "model-00002-of-00002");
  // The file that was saved over both does.
  WriteForeign(In("model.safetensors"), {Whole("a", a_), Whole("b", b_)});
  std::filesystem::remove(In("model-00001-of-00002.safetensors"));
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->beside(),
            std::vector<std::string>{"model.fp16.safetensors"});
  ASSERT_EQ((*checkpoint)->notes().size(), 1U);
  EXPECT_NE((*checkpoint)->notes()[0].find("model.fp16.safetensors"),
            std::string::npos);
  EXPECT_EQ(ReadAll(Path("c"))->at("b"), b_.bytes);
}

// As transformers does; before, the index won in silence.
TEST_F(ScanTest, TheSingleFileIsReadBeforeAnIndex) {
  const Array other = MakeArray(Dtype::kF32, {12, 5}, 7);
  WriteForeign(In("model-00001-of-00002.safetensors"), {Whole("a", other)});
  WriteForeign(In("model-00002-of-00002.safetensors"), {Whole("b", b_)});
  Index({{"a", "model-00001-of-00002.safetensors"},
         {"b", "model-00002-of-00002.safetensors"}});
  WriteForeign(In("model.safetensors"), {Whole("a", a_), Whole("b", b_)});
  const auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ(ReadAll(Path("c"))->at("a"), a_.bytes);
  ASSERT_EQ((*checkpoint)->notes().size(), 1u);
  EXPECT_NE((*checkpoint)->notes()[0].find("model-00001-of-00002.safetensors"),
            std::string::npos);
  EXPECT_EQ((*checkpoint)->beside().size(), 2u);
  // Two sets of names are two models.
  WriteForeign(In("model.safetensors"), {Whole("a", a_)});
  ExpectError(ErrorKind::kConflict, "'b'");
  WriteForeign(In("model.safetensors"),
               {Whole("a", a_), Whole("b", b_), Whole("c", b_)});
  ExpectError(ErrorKind::kConflict, "'c'");
}

TEST_F(ScanTest, OfSeveralIndicesOnlyTheModelsCounts) {
  WriteForeign(In("x.safetensors"), {Whole("a", a_)});
  for (const char* stem : {"consolidated", "adapter_model"}) {
    HfIndex index;
    index.weight_map = {{"a", "y.safetensors"}};
    WriteText(In(std::string(stem) + std::string(kIndexSuffix)),
              BuildHfIndex(index));
  }
  EXPECT_EQ((*OpenCheckpoint(Path("c")))->source(), "headers");
  Index({{"a", "x.safetensors"}});
  EXPECT_EQ((*OpenCheckpoint(Path("c")))->source(), "index");
}

TEST_F(ScanTest, IdentityIsOfTheFiles) {
  WriteForeign(In("model.safetensors"), {Whole("a", a_)});
  const std::string first = (*OpenCheckpoint(Path("c")))->identity();
  EXPECT_EQ((*OpenCheckpoint(Path("c")))->identity(), first);
  const auto time = std::filesystem::last_write_time(In("model.safetensors"));
  std::filesystem::last_write_time(In("model.safetensors"),
                                   time + std::chrono::seconds(1));
  EXPECT_NE((*OpenCheckpoint(Path("c")))->identity(), first);
}

TEST_F(ScanTest, IndexThatLies) {
  WriteForeign(In("x.safetensors"), {Whole("a", a_)});
  WriteForeign(In("y.safetensors"), {Whole("b", b_)});
  const auto notes = [&] {
    return testing::PrintToString((*OpenCheckpoint(Path("c")))->notes());
  };
  // As good as absent; who asks for it hears so.
  Index({{"a", "y.safetensors"}, {"b", "y.safetensors"}});
  EXPECT_NE(notes().find("no file of it has: a"), std::string::npos) << notes();
  EXPECT_EQ(ReadAll(Path("c"))->at("b"), b_.bytes);
  // In the other file than it says.
  Index({{"a", "y.safetensors"}, {"b", "x.safetensors"}});
  EXPECT_EQ(notes(), "{}");
  EXPECT_EQ(ReadAll(Path("c"))->at("a"), a_.bytes);
  Index({{"a", "../x.safetensors"}});
  ExpectError(ErrorKind::kCorrupt, "");
  WriteText(In(std::string(kIndexName)), "{");
  ExpectError(ErrorKind::kCorrupt, std::string(kIndexName));
}

TEST_F(ScanTest, IndexThatLeavesATensorOut) {
  WriteForeign(In("x.safetensors"), {Whole("a", a_), Whole("b", b_)});
  Index({{"a", "x.safetensors"}});
  EXPECT_EQ(ReadAll(Path("c"))->at("b"), b_.bytes);
}

// Without an index the names say how many files there are.
TEST_F(ScanTest, NumberedFilesMustAllBeThere) {
  for (int64_t i = 1; i <= 3; ++i) {
    WriteForeign(In(FinalFileName(i, 3)), {Whole("t" + std::to_string(i), b_)});
  }
  EXPECT_OK(OpenCheckpoint(Path("c")).status());
  for (int64_t i = 1; i <= 3; ++i) {
    const std::string file = In(FinalFileName(i, 3));
    const std::string bytes = ReadText(file);
    std::filesystem::remove(file);
    ExpectError(ErrorKind::kIncomplete,
                "file " + std::to_string(i) + " of 3 is missing");
    WriteText(file, bytes);
  }
  // A rank that holds nothing of an index writes no such file.
  std::filesystem::remove_all(Path("c"));
  std::filesystem::create_directory(Path("c"));
  WriteForeign(In(ShardFileName(0, 1, 2)), {Whole("t1", b_)});
  ExpectError(ErrorKind::kIncomplete, "file 2 of 2 is missing");
  WriteForeign(In(ShardFileName(1, 2, 2)), {Whole("t2", b_)});
  EXPECT_OK(OpenCheckpoint(Path("c")).status());
}

TEST_F(ScanTest, ShapesThatNoFileSaysAreNamed) {
  Shards(a_, {0, 6, 12});
  WriteForeign(In("plain.safetensors"), {Whole("b", b_)});
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->hulls(), std::vector<std::string>{"a"});
  ASSERT_OK(SaveAll(Path("ours"), GridPieces("a", a_, {2, 1})).status());
  EXPECT_TRUE(OpenCheckpoint(Path("ours")).value()->hulls().empty());
}

TEST_F(ScanTest, StaleShardsOfAnotherWorldSize) {
  Shards(a_, {0, 3, 6, 9, 12});
  Shards(a_, {0, 6, 12});  // two ranks over four: 3 and 4 are stale
  ExpectError(ErrorKind::kConflict, "shard-0000");
}

TEST_F(ScanTest, Holes) {
  Shards(a_, {0, 3, 6, 12});
  std::filesystem::remove(In(ShardFileName(1, 1, 1)));
  ExpectError(ErrorKind::kIncomplete, "[3:6, 0:5]");
  std::filesystem::remove(In(ShardFileName(0, 1, 1)));
  ExpectError(ErrorKind::kIncomplete, "'a'");
}

// In two and three dimensions a missing cell of a grid is named.
TEST_F(ScanTest, HolesInGrids) {
  const Array cube = MakeArray(Dtype::kU8, {4, 4, 4}, 3);
  const auto pieces = GridPieces("cube", cube, {2, 2, 2});
  for (const Piece& piece : pieces) {
    WriteForeign(In(ShardFileName(piece.rank, 1, 1)),
                 {ForeignBox("cube", cube, piece.box)});
  }
  EXPECT_EQ(ReadAll(Path("c"))->at("cube"), cube.bytes);
  std::filesystem::remove(In(ShardFileName(5, 1, 1)));
  ExpectError(ErrorKind::kIncomplete, "'cube'");
}

TEST_F(ScanTest, OverlapsAndMismatches) {
  Shards(a_, {0, 6, 12});
  WriteForeign(In(ShardFileName(1, 1, 1)),
               {ForeignBox("a", a_, {{5, 0}, {7, 5}})});
  ExpectError(ErrorKind::kConflict, "'a'");
  const Array ints = MakeArray(Dtype::kI32, {12, 5}, 1);
  WriteForeign(In(ShardFileName(1, 1, 1)),
               {ForeignBox("a", ints, {{6, 0}, {6, 5}})});
  ExpectError(ErrorKind::kConflict, "I32");
  const Array flat = MakeArray(Dtype::kF32, {60}, 1);
  WriteForeign(In(ShardFileName(1, 1, 1)),
               {ForeignBox("a", flat, {{30}, {30}})});
  ExpectError(ErrorKind::kConflict, "dimensions");
  WriteForeign(In(ShardFileName(1, 1, 1)), {Whole("a", a_)});
  ExpectError(ErrorKind::kConflict, "'a'");
}

TEST_F(ScanTest, NothingThere) {
  ExpectError(ErrorKind::kIncomplete, "holds no checkpoint");
  std::filesystem::create_directory(In("sharded"));
  ExpectError(ErrorKind::kIncomplete, "'sharded'");
  EXPECT_EQ(OpenCheckpoint(Path("none")).status().kind(),
            ErrorKind::kIncomplete);
  WriteText(Path("file"), "x");
  EXPECT_FALSE(OpenCheckpoint(Path("file")).ok());
}

TEST_F(ScanTest, DamagedFilesAreNamed) {
  Shards(a_, {0, 6, 12});
  const std::string file = In(ShardFileName(1, 1, 1));
  const std::string good = ReadText(file);
  for (const size_t size : {size_t{0}, size_t{7}, size_t{9}, good.size() - 1}) {
    WriteText(file, good.substr(0, size));
    ExpectError(size == 0 ? ErrorKind::kIncomplete : ErrorKind::kCorrupt,
                "shard-00002");
  }
  WriteText(file, good + "x");
  ExpectError(ErrorKind::kCorrupt, "shard-00002");
}

// A file that shrinks or grows after it was opened is not the one of the
// headers any more.
TEST_F(ScanTest, FilesThatChangeAfterTheScan) {
  WriteForeign(In("model.safetensors"), {Whole("a", a_)});
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  WriteForeign(In("model.safetensors"), {Whole("b", b_), Whole("a", a_)});
  const Status status =
      ReadBox(*checkpoint, "a", Box::Whole(a_.shape)).status();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
  EXPECT_NE(status.ToString().find("model.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace torch_ckpt
