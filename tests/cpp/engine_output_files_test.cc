#include <random>

#include "engine/output_files.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

TEST(SegmentDigester, AnySplitGivesTheDigestsOfTheSegments) {
  std::mt19937 random(3);
  std::string bytes(3 * kSegmentBytes + 12345, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  std::vector<uint32_t> expected;
  for (size_t at = 0; at < bytes.size(); at += kSegmentBytes) {
    expected.push_back(
        Crc32c(0, bytes.data() + at,
               std::min<size_t>(kSegmentBytes, bytes.size() - at)));
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> digests(expected.size(), 0);
    std::string copy(bytes.size(), '\0');
    SegmentDigester digester(digests.data(), 0);
    for (size_t at = 0; at < bytes.size();) {
      const size_t most = round < 10 ? kSegmentBytes / 3 : 3 * kSegmentBytes;
      const size_t size = std::min<size_t>(random() % most, bytes.size() - at);
      const ByteSpan part = AsBytes(bytes).subspan(at, size);
      auto* to = reinterpret_cast<std::byte*>(copy.data()) + at;
      if (random() % 2 == 0) {
        digester.Copy(to, part);
      } else {
        std::memcpy(to, part.data(), size);
        digester.Add({to, size});
      }
      at += size;
      EXPECT_EQ(digester.offset(), at);
    }
    EXPECT_EQ(digests, expected);
    EXPECT_TRUE(copy == bytes);
  }
}

class OutputFilesTest : public EngineTest {};

TEST_F(OutputFilesTest, AFillThatForgetsToDigestIsAnErrorAndLeavesNothing) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  const std::vector<OutputSpec> files = {
      {"a", "a.staged", "", FileRole::kExtra, 10000, {}}};
  Job job;
  const auto written =
      WriteOutputs(*staging, files, {}, &job,
                   [](size_t, MutableByteSpan out, MutableByteSpan, int,
                      SegmentDigester* digester) -> Status {
                     std::fill(out.begin(), out.end(), std::byte{1});
                     digester->Add(out.first(out.size() - 1));
                     return {};
                   });
  EXPECT_EQ(written.status().kind(), ErrorKind::kInternal);
  EXPECT_EQ(written.status().file(), "a");
  EXPECT_TRUE(Names(Path("stage")).empty());
}

// Byte `at` of file `file`.
std::byte ByteAt(size_t file, uint64_t at) {
  return static_cast<std::byte>((at * 31 + at / 4096 + file * 7) % 251);
}

const FillFn kFill = [](size_t file, MutableByteSpan out, MutableByteSpan, int,
                        SegmentDigester* digester) -> Status {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = ByteAt(file, digester->offset() + i);
  }
  digester->Add(out);
  return {};
};

TEST_F(OutputFilesTest, StagingThatHasGoneIsAnotherSave) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  std::filesystem::remove(Path("stage"));
  const std::vector<OutputSpec> files = {
      {"a", "a.staged", "", FileRole::kExtra, 10000, {}}};
  Job job;
  const auto written = WriteOutputs(
      *staging, files, {}, &job,
      [](size_t, MutableByteSpan, MutableByteSpan, int,
         SegmentDigester*) -> Status { return Internal("is not reached"); });
  EXPECT_EQ(written.status().kind(), ErrorKind::kConflict)
      << written.status().ToString();
}

TEST_F(OutputFilesTest, PartsOfSeveralWritersMakeTheFilesAndTheirDigests) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  const std::vector<OutputSpec> files = {
      {"large", "large", "", FileRole::kExtra, 3 * kPieceBytes + 12345, {}},
      {"empty", "empty", "", FileRole::kExtra, 0, {}},
      {"small", "small", "", FileRole::kExtra, 100, {}},
      {"other", "other", "", FileRole::kExtra, kSegmentBytes + 4096, {}}};
  ASSERT_OK(CreateOutputs(*staging, files));
  uint64_t total = 0;
  for (const OutputSpec& file : files) total += file.bytes;
  constexpr int kParts = 5;
  std::vector<std::vector<WrittenRange>> written(files.size());
  for (int part = 0; part < kParts; ++part) {
    std::vector<OutputSpec> own = files;
    TakePart(&own, part, kParts);
    Job job;
    const auto ranges = WriteOutputs(*staging, own, {}, &job, kFill);
    ASSERT_OK(ranges.status());
    uint64_t bytes = 0;
    for (size_t f = 0; f < files.size(); ++f) {
      for (const WrittenRange& range : (*ranges)[f]) {
        bytes += range.bytes.end - range.bytes.begin;
        written[f].push_back(range);
      }
    }
    EXPECT_GT(bytes, total / kParts * 9 / 10);
    EXPECT_LT(bytes, total / kParts * 11 / 10);
  }
  for (size_t f = 0; f < files.size(); ++f) {
    std::string expected(files[f].bytes, '\0');
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = static_cast<char>(ByteAt(f, i));
    }
    EXPECT_TRUE(ReadText(Path("stage/" + files[f].staged)) == expected);
    std::vector<uint32_t> digests;
    for (size_t at = 0; at < expected.size(); at += kSegmentBytes) {
      digests.push_back(
          Crc32c(0, expected.data() + at,
                 std::min<size_t>(kSegmentBytes, expected.size() - at)));
    }
    std::reverse(written[f].begin(), written[f].end());
    const auto combined = CombineRanges(written[f], files[f].bytes);
    ASSERT_OK(combined.status());
    EXPECT_EQ(*combined, digests);
  }
}

TEST_F(OutputFilesTest, ARangeThatIsNoWholeBlocksIsRefused) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  std::vector<OutputSpec> files = {{"a", "a", "", FileRole::kExtra, 10000, {}}};
  ASSERT_OK(CreateOutputs(*staging, files));
  for (const ByteRange range :
       {ByteRange{1, 4096}, ByteRange{0, 4097}, ByteRange{4096, 4096},
        ByteRange{8192, 12288}}) {
    files[0].ranges = {range};
    Job job;
    EXPECT_EQ(WriteOutputs(*staging, files, {}, &job, kFill).status().kind(),
              ErrorKind::kInternal);
  }
  EXPECT_EQ(Names(Path("stage")), std::vector<std::string>{"a"});
}

TEST(CombineRanges, HolesOverlapsAndWrongDigestsAreErrors) {
  const WrittenRange head{{0, 4096}, {1}};
  const WrittenRange tail{{4096, 8192}, {2}};
  EXPECT_OK(CombineRanges({tail, head}, 8192).status());
  const auto hole = CombineRanges({tail}, 8192).status();
  EXPECT_EQ(hole.kind(), ErrorKind::kIncomplete);
  EXPECT_NE(hole.message().find("bytes 0 to 4096"), std::string::npos);
  EXPECT_EQ(CombineRanges({head}, 8192).status().kind(),
            ErrorKind::kIncomplete);
  EXPECT_EQ(CombineRanges({head, tail, tail}, 8192).status().kind(),
            ErrorKind::kConflict);
  EXPECT_EQ(CombineRanges({head, tail}, 8000).status().kind(),
            ErrorKind::kConflict);
  EXPECT_EQ(CombineRanges({head, {{4096, 8192}, {2, 3}}}, 8192).status().kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_OK(CombineRanges({}, 0).status());
}

}  // namespace
}  // namespace torch_ckpt
