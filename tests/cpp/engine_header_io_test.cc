// The short headers that a rank leaves in staging, and the headers themselves.
#include <random>

#include "engine/open/header_io.h"
#include "final_test_util.h"

namespace torch_ckpt {
namespace {

void ExpectSame(const FileHeader& a, const FileHeader& b) {
  EXPECT_EQ(a.header.data_begin, b.header.data_begin);
  EXPECT_EQ(a.header.file_bytes, b.header.file_bytes);
  EXPECT_EQ(a.sharding.file_id, b.sharding.file_id);
  EXPECT_EQ(a.sharding.has_sharding_info, b.sharding.has_sharding_info);
  ASSERT_EQ(a.header.tensors.size(), b.header.tensors.size());
  ASSERT_EQ(a.sharding.entries.size(), b.sharding.entries.size());
  for (size_t i = 0; i < a.header.tensors.size(); ++i) {
    const SafetensorsEntry &x = a.header.tensors[i], &y = b.header.tensors[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.dtype, y.dtype) << x.name;
    EXPECT_EQ(x.shape, y.shape) << x.name;
    EXPECT_EQ(x.begin, y.begin) << x.name;
    EXPECT_EQ(x.end, y.end) << x.name;
    if (a.sharding.entries.empty()) continue;  // of final files
    EXPECT_EQ(a.sharding.entries[i].offsets, b.sharding.entries[i].offsets);
    EXPECT_EQ(a.sharding.entries[i].global_shape,
              b.sharding.entries[i].global_shape)
        << x.name;
  }
}

class HeaderIoTest : public EngineTest {
 protected:
  // Writes the shards (or, with one rank, a final file) of some tensors.
  void Stage(bool sharded, uint32_t seed) {
    std::mt19937 engine(seed);
    const auto random = [&] { return static_cast<uint32_t>(engine()); };
    std::vector<Piece> pieces;
    for (int t = 0; t < 12; ++t) {
      const auto dtype = static_cast<Dtype>(random() % kDtypeCount);
      Dims shape;
      for (uint32_t d = random() % 4; d > 0; --d) shape.push_back(random() % 7);
      if (shape.empty() && DtypeUnit(dtype).elements > 1) shape.push_back(1);
      if (!shape.empty()) shape[shape.size() - 1] *= DtypeUnit(dtype).elements;
      arrays_.push_back(
          std::make_unique<Array>(MakeArray(dtype, shape, random())));
      // Long, so that the header is worth a short form.
      const std::string name =
          "t\"\n" + std::string(kMinStagedText / 8, 'x') + std::to_string(t);
      const Dims parts = Dims::Filled(shape.size(), 1);
      Dims cut = parts;
      if (sharded && !shape.empty()) cut[0] = 3;
      for (Piece& piece : GridPieces(name, *arrays_.back(), cut)) {
        pieces.push_back(std::move(piece));
      }
    }
    if (sharded) {
      ASSERT_OK(WriteRanks(staging_, pieces, {}, &request_));
      return;
    }
    auto directory = Directory::Open(staging_);
    ASSERT_OK(directory.status());
    std::filesystem::remove(staging_ + "/final_files");  // of an earlier call
    auto list =
        StageFinalFiles(*directory, FinalTensorsOf(pieces), {}, {}, false);
    ASSERT_OK(list.status());
    for (const StagedFile& file : list->files) {
      request_.files.push_back(file);
    }
  }
  FileHeader FromText(const std::string& staged) {
    auto directory = Directory::Open(staging_);
    auto file = directory->OpenFile(staged, {});
    auto header = ReadFileHeader(*file, *file->Stat());
    EXPECT_TRUE(header.ok()) << header.status().ToString();
    return std::move(header).value();
  }
  Result<FileHeader> Staged(const std::string& staged) {
    TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(staging_));
    return ReadStagedHeader(directory, staged);
  }

  void SetUp() override {
    EngineTest::SetUp();
    staging_ = Path("stage");
    std::filesystem::create_directory(staging_);
  }
  std::string staging_;
  std::vector<std::unique_ptr<Array>> arrays_;
  CommitRequest request_;
};

TEST_F(HeaderIoTest, TheShortHeaderSaysWhatTheTextSays) {
  for (uint32_t seed = 0; seed < 20; ++seed) Stage(seed % 2 == 0, seed);
  ASSERT_GT(request_.files.size(), 20u);
  for (const StagedFile& file : request_.files) {
    ASSERT_TRUE(
        std::filesystem::exists(staging_ + "/" + file.staged + ".header"));
    auto short_header = Staged(file.staged);
    ASSERT_OK(short_header.status());
    EXPECT_TRUE(short_header->header.metadata.empty()) << "this was the text";
    ExpectSame(*short_header, FromText(file.staged));
  }
}

TEST_F(HeaderIoTest, HeadersOfAnyLength) {
  const std::string entry = R"({"x":{"dtype":"U8","shape":[5000],)"
                            R"("data_offsets":[0,5000]})";
  for (const uint64_t end : {100, 4095, 4096, 4097, 8192, 100'000}) {
    std::string text;
    AppendU64(&text, end - 8);
    text += entry + "}" + std::string(end - 8 - entry.size() - 1, ' ');
    const std::string path = staging_ + "/any";
    WriteText(path, text + std::string(5000, 'x'));
    const FileHeader header = FromText("any");
    EXPECT_EQ(header.header.data_begin, end);
    ASSERT_EQ(header.header.tensors.size(), 1u);
    WriteText(path, text.substr(0, end - 1));
    auto directory = Directory::Open(staging_);
    auto file = directory->OpenFile("any", {});
    const Status cut = ReadFileHeader(*file, *file->Stat()).status();
    EXPECT_EQ(cut.kind(), ErrorKind::kCorrupt);
    EXPECT_EQ(cut.file(), path);
  }
}

TEST_F(HeaderIoTest, WithoutAShortHeaderThatFitsTheTextIsRead) {
  Stage(true, 1);
  Stage(true, 2);
  const std::string staged = request_.files.front().staged;
  const std::string other = request_.files.back().staged;
  const std::string path = staging_ + "/" + staged + ".header";
  const std::string good = ReadText(path);
  const auto expect_text = [&] {
    auto header = Staged(staged);
    ASSERT_OK(header.status());
    EXPECT_FALSE(header->header.metadata.empty());
    ExpectSame(*header, FromText(staged));
  };
  std::filesystem::remove(path);
  expect_text();
  for (size_t at = 0; at < good.size(); at += 1 + good.size() / 40) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    WriteText(path, bad);
    expect_text();
  }
  WriteText(path, good.substr(0, good.size() / 2));
  expect_text();
  WriteText(path, ReadText(staging_ + "/" + other + ".header"));
  expect_text();
}

TEST_F(HeaderIoTest, AShortTextGetsNoShortForm) {
  const Array a = MakeArray(Dtype::kF32, {2, 3}, 1);
  ASSERT_OK(WriteRanks(staging_, {WholePiece("a", a)}, {}, &request_));
  EXPECT_EQ(Names(staging_),
            std::vector<std::string>{request_.files.front().staged});
  EXPECT_OK(Staged(request_.files.front().staged).status());
}

// The short header never hides what happened to the file.
TEST_F(HeaderIoTest, AChangedTextIsReadForItself) {
  Stage(true, 3);
  const std::string staged = request_.files.front().staged;
  const std::string path = staging_ + "/" + staged;
  const std::string good = ReadText(path);
  const size_t at = good.find("\"t\\\"\\nx");
  ASSERT_NE(at, std::string::npos);
  std::string renamed = good;
  renamed[at + 6] = 'y';
  WriteText(path, renamed);
  EXPECT_EQ(Staged(staged).status().kind(), ErrorKind::kCorrupt)
      << "the sharding info names a tensor that is gone";
  std::string broken = good;
  broken[at] = '!';
  WriteText(path, broken);
  EXPECT_EQ(Staged(staged).status().kind(), ErrorKind::kCorrupt);
  WriteText(path, good + "x");
  EXPECT_EQ(Staged(staged).status().kind(), ErrorKind::kCorrupt);
  WriteText(path, good.substr(0, good.size() - 1));
  EXPECT_EQ(Staged(staged).status().kind(), ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace torch_ckpt
