#include "engine/merge_log.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

class MergeLogTest : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    std::filesystem::create_directory(Path("stage"));
    auto staging = Directory::Open(Path("stage"));
    ASSERT_OK(staging.status());
    staging_ = std::move(staging).value();
    bytes_ = std::string(2 * kSegmentBytes + 5000, 'x');
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<char>(i * 7 % 251);
    }
    WriteText(Path("stage/a"), bytes_);
    files_ = {{"a", "a", "", FileRole::kData, bytes_.size(), {}},
              {"gone", "gone", "", FileRole::kData, 4096, {}}};
  }

  WrittenRange Range(uint64_t begin, uint64_t end) const {
    WrittenRange range{{begin, end}, {}};
    range.crc32c.assign(SegmentCount(range.bytes), 0);
    SegmentDigester digester(range.crc32c.data(), begin);
    digester.Add(AsBytes(bytes_).subspan(begin, end - begin));
    return range;
  }
  std::vector<ByteRange> Kept() {
    auto kept = ReadMergeLogs(staging_, files_);
    EXPECT_OK(kept.status());
    EXPECT_TRUE((*kept)[1].empty());
    std::vector<ByteRange> ranges;
    for (const WrittenRange& range : (*kept)[0]) ranges.push_back(range.bytes);
    return ranges;
  }
  std::string LogPath() {
    for (const std::string& name : Names(Path("stage"))) {
      if (name.starts_with("merge_log.")) return Path("stage/" + name);
    }
    return {};
  }

  Directory staging_;
  std::string bytes_;
  std::vector<OutputSpec> files_;
};

TEST_F(MergeLogTest, WhatWasWrittenIsKeptOnce) {
  EXPECT_TRUE(Kept().empty());
  for (int log = 0; log < 2; ++log) {
    auto created = MergeLog::Create(staging_);
    ASSERT_OK(created.status());
    ASSERT_OK(created->Add(0, Range(kSegmentBytes - 4096, bytes_.size())));
    ASSERT_OK(created->Add(0, Range(0, 8192)));
    ASSERT_OK(created->Add(1, {{0, 4096}, {0}}));
  }
  EXPECT_EQ(Kept(), (std::vector<ByteRange>{
                        {0, 8192}, {kSegmentBytes - 4096, bytes_.size()}}));
}

TEST_F(MergeLogTest, TornLinesAndTornBytesDoNotCount) {
  auto log = MergeLog::Create(staging_);
  ASSERT_OK(log.status());
  ASSERT_OK(log->Add(0, Range(0, 4096)));
  ASSERT_OK(log->Add(0, Range(4096, 8192)));
  const std::string text = ReadText(LogPath());
  // Any byte of it, and any length.
  for (size_t at = 0; at < text.size(); ++at) {
    std::string damaged = text;
    damaged[at] ^= 4;
    WriteText(LogPath(), damaged);
    EXPECT_LE(Kept().size(), 1u) << at;
    WriteText(LogPath(), text.substr(0, at));
    EXPECT_LE(Kept().size(), 1u) << at;
  }
  WriteText(LogPath(), std::string(100, '\0') + "\n" + text);
  EXPECT_EQ(Kept().size(), 2u);
  std::string torn = bytes_;
  torn[5000] ^= 1;
  WriteText(Path("stage/a"), torn);
  EXPECT_EQ(Kept(), (std::vector<ByteRange>{{0, 4096}}));
  WriteText(Path("stage/a"), bytes_ + "more");
  EXPECT_TRUE(Kept().empty());
}

TEST_F(MergeLogTest, RangesThatCannotHaveBeenWrittenDoNotCount) {
  auto log = MergeLog::Create(staging_);
  ASSERT_OK(log.status());
  ASSERT_OK(log->Add(7, Range(0, 4096)));
  ASSERT_OK(log->Add(0, {{1, 4096}, {0}}));
  ASSERT_OK(log->Add(0, {{0, 4097}, {0}}));
  ASSERT_OK(log->Add(0, {{0, 4096}, {0, 1}}));
  ASSERT_OK(log->Add(0, {{0, 4096}, {}}));
  ASSERT_OK(log->Add(0, {{4096, 4096}, {}}));
  ASSERT_OK(log->Add(0, {{0, bytes_.size() + 4096}, {0, 0, 0}}));
  EXPECT_TRUE(Kept().empty());
}

TEST_F(MergeLogTest, AMarkComesBackOrIsNone) {
  EXPECT_FALSE(ReadMergeMark(staging_));
  const MergeMark mark{"what\nit is", {NewId(), NewId()}};
  ASSERT_OK(WriteMergeMark(staging_, mark));
  const auto read = ReadMergeMark(staging_);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->identity, mark.identity);
  EXPECT_EQ(read->ids, mark.ids);
  const std::string path = Path("stage/merge_plan");
  const std::string text = ReadText(path);
  for (size_t at = 0; at < text.size(); ++at) {
    std::string damaged = text;
    damaged[at] ^= 1;
    WriteText(path, damaged);
    EXPECT_FALSE(ReadMergeMark(staging_)) << at;
    WriteText(path, text.substr(0, at));
    EXPECT_FALSE(ReadMergeMark(staging_)) << at;
  }
}

}  // namespace
}  // namespace torch_ckpt
