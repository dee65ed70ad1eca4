#include <algorithm>
#include <random>

#include "engine/write/output_files.h"
#include "engine/write/provider.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

std::vector<uint32_t> DigestsOf(std::string_view bytes) {
  std::vector<uint32_t> digests;
  for (size_t at = 0; at < bytes.size(); at += kSegmentBytes) {
    digests.push_back(
        Crc32c(0, bytes.data() + at,
               std::min<size_t>(kSegmentBytes, bytes.size() - at)));
  }
  return digests;
}

TEST(SegmentDigester, AnySplitGivesTheDigestsOfTheSegments) {
  std::mt19937 random(3);
  const std::string bytes = RandomBytes(3 * kSegmentBytes + 12345, 4);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> digests(4, 0);
    SegmentDigester digester(digests.data(), 0);
    for (size_t at = 0; at < bytes.size();) {
      const size_t most = round < 10 ? kSegmentBytes / 3 : 3 * kSegmentBytes;
      size_t size = std::min<size_t>(random() % most, bytes.size() - at);
      if (random() % 2 == 0) {
        digester.Add(AsBytes(bytes).subspan(at, size));
      } else {
        size = std::min(size, kSegmentBytes - at % kSegmentBytes);
        digester.Add(Crc32c(0, bytes.data() + at, size), size);
      }
      at += size;
      EXPECT_EQ(digester.offset(), at);
    }
    EXPECT_EQ(digests, DigestsOf(bytes));
  }
}

// Whatever providers do with a buffer, in which order: its bytes and digests.
TEST(FillBuffer, AnyOrderAndAnyWayGiveTheBytesAndTheirDigests) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    // The buffer begins anywhere in its file.
    const uint64_t offset = random() % (2 * kSegmentBytes);
    const std::string file =
        RandomBytes(offset + random() % (3 * kSegmentBytes),
                    static_cast<uint32_t>(random()));
    const std::string bytes = file.substr(offset);
    std::vector<std::pair<size_t, size_t>> parts;
    const size_t most = round % 2 == 0 ? 100'000 : 900'000;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size = std::min(1 + random() % most, bytes.size() - at);
      parts.push_back({at, size});
      at += size;
    }
    if (round % 4 >= 2) std::shuffle(parts.begin(), parts.end(), random);
    std::string out(bytes.size(), '\0');
    FillBuffer buffer({reinterpret_cast<std::byte*>(out.data()), out.size()},
                      offset, 0, FillBuffer::Copies::kDigested);
    for (const auto& [at, size] : parts) {
      const ByteSpan part = AsBytes(bytes).subspan(at, size);
      const int way = static_cast<int>(random() % 4);
      if (way == 0) {
        buffer.Copy(at, part);
      } else if (way == 1) {
        for (size_t done = 0; done < size;) {
          const size_t step = std::min<size_t>(
              size - done,
              kSegmentBytes - (offset + at + done) % kSegmentBytes);
          std::memcpy(buffer.Out(at + done, step).data(), part.data() + done,
                      step);
          buffer.Made(at + done, step, Crc32c(0, part.data() + done, step));
          done += step;
        }
      } else {
        std::memcpy(buffer.Out(at, size).data(), part.data(), size);
        if (way == 2) buffer.Made(at, size);
      }
    }
    EXPECT_TRUE(out == bytes);
    // What was written of the first segment before.
    std::vector<uint32_t> digests(5, 0);
    const size_t before = offset % kSegmentBytes;
    digests[0] = Crc32c(0, file.data() + (offset - before), before);
    SegmentDigester digester(digests.data(), offset);
    buffer.Digest(&digester);
    EXPECT_EQ(digester.offset(), file.size());
    std::vector<uint32_t> expected =
        DigestsOf(std::string_view(file).substr(offset - before));
    expected.resize(digests.size());
    EXPECT_EQ(digests, expected);
  }
}

class OutputFilesTest : public EngineTest {};

// Byte `at` of file `file`.
std::byte ByteAt(size_t file, uint64_t at) {
  return static_cast<std::byte>((at * 31 + at / 4096 + file * 7) % 251);
}

// Things are files.
class Computed final : public Provider {
 public:
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan,
              FillBuffer* buffer) override {
    for (const Stretch& stretch : stretches) {
      const MutableByteSpan out = buffer->Out(stretch.at, stretch.bytes);
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = ByteAt(stretch.index, stretch.from + i);
      }
      buffer->Filled(out.size());
    }
    return {};
  }
};

Computed computed;

std::vector<Output> OutputsOf(const std::vector<StagedFile>& files) {
  std::vector<Output> outputs;
  for (const StagedFile& file : files) {
    outputs.push_back({file, {}});
    outputs.back().extents.Append({&computed, outputs.size() - 1}, file.bytes);
  }
  return outputs;
}

TEST_F(OutputFilesTest, StagingThatHasGoneIsAnotherSave) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  std::filesystem::remove(Path("stage"));
  const std::vector<StagedFile> files = {
      {{"a", "", FileRole::kExtra, 10000, {}}, "a.staged"}};
  Job job;
  const auto written = WriteOutputs(*staging, OutputsOf(files), {}, &job);
  EXPECT_EQ(written.status().kind(), ErrorKind::kConflict)
      << written.status().ToString();
}

TEST_F(OutputFilesTest, PartsOfSeveralWritersMakeTheFilesAndTheirDigests) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  const std::vector<StagedFile> files = {
      {{"large", "", FileRole::kExtra, 3 * kPieceBytes + 12345, {}}, "large"},
      {{"empty", "", FileRole::kExtra, 0, {}}, "empty"},
      {{"small", "", FileRole::kExtra, 100, {}}, "small"},
      {{"other", "", FileRole::kExtra, kSegmentBytes + 4096, {}}, "other"}};
  for (const StagedFile& file : files) ASSERT_OK(CreateOutput(*staging, file));
  uint64_t total = 0;
  for (const StagedFile& file : files) total += file.bytes;
  constexpr int kShares = 5;
  std::vector<std::vector<WrittenRange>> written(files.size());
  for (int share = 0; share < kShares; ++share) {
    std::vector<Output> own = OutputsOf(files);
    TakeShare(&own, share, kShares);
    Job job;
    const auto ranges = WriteOutputs(*staging, own, {}, &job);
    ASSERT_OK(ranges.status());
    uint64_t bytes = 0;
    for (size_t f = 0; f < files.size(); ++f) {
      for (const WrittenRange& range : (*ranges)[f]) {
        bytes += range.bytes.end - range.bytes.begin;
        written[f].push_back(range);
      }
    }
    EXPECT_GT(bytes, total / kShares * 9 / 10);
    EXPECT_LT(bytes, total / kShares * 11 / 10);
  }
  for (size_t f = 0; f < files.size(); ++f) {
    std::string expected(files[f].bytes, '\0');
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = static_cast<char>(ByteAt(f, i));
    }
    EXPECT_TRUE(ReadText(Path("stage/" + files[f].staged)) == expected);
    std::reverse(written[f].begin(), written[f].end());
    const auto combined = CombineRanges(written[f], files[f].bytes);
    ASSERT_OK(combined.status());
    EXPECT_EQ(*combined, DigestsOf(expected));
  }
}

TEST_F(OutputFilesTest, ARangeThatIsNoWholeBlocksIsRefused) {
  std::filesystem::create_directory(Path("stage"));
  auto staging = Directory::Open(Path("stage"));
  ASSERT_OK(staging.status());
  std::vector<StagedFile> files = {
      {{"a", "", FileRole::kExtra, 10000, {}}, "a"}};
  ASSERT_OK(CreateOutput(*staging, files[0]));
  for (const ByteRange range :
       {ByteRange{1, 4096}, ByteRange{0, 4097}, ByteRange{4096, 4096},
        ByteRange{8192, 12288}}) {
    std::vector<Output> outputs = OutputsOf(files);
    outputs[0].ranges = {range};
    Job job;
    EXPECT_EQ(WriteOutputs(*staging, outputs, {}, &job).status().kind(),
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
