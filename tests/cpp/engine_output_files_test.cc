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
    // What stood there of an earlier try does not count.
    std::vector<uint32_t> digests(expected.size(), 0xdeadbeef);
    std::string copy(bytes.size(), '\0');
    SegmentDigester digester(&digests, 0);
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
      {"a", "a.staged", "", FileRole::kExtra, 10000}};
  Job job(JobKind::kWrite);
  const auto written =
      WriteOutputs(*staging, files, {}, false, {}, &job,
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

}  // namespace
}  // namespace torch_ckpt
