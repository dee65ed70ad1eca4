#include "engine/read/verify_job.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

class VerifyJobTest : public EngineDiskTest {
 protected:
  Result<VerifyReport> Verify(int workers = 2) {
    TC_ASSIGN_OR_RETURN(const CheckpointPtr checkpoint,
                        OpenCheckpoint(Path("c")));
    Job job;
    auto report = RunVerifyJob(checkpoint, {workers}, &job);
    if (report.ok()) {
      EXPECT_EQ(job.done(), report->bytes);
    }
    return report;
  }
};

TEST_F(VerifyJobTest, ReadsEveryByteOfEveryFile) {
  const Array big = MakeArray(Dtype::kF32, {3000, 1000}, 1);  // 12 MB
  SaveSettings settings;
  settings.object = "{\"step\": 7}";
  std::vector<Piece> pieces = GridPieces("big", big, {1, 1});
  const Array small = MakeArray(Dtype::kI8, {5}, 2);
  pieces.push_back(WholePiece("small", small, 1));
  ASSERT_OK(SaveAll(Path("c"), pieces, settings).status());
  uint64_t bytes = 0;
  for (const std::string& name : Names(Path("c"))) {
    if (name != kManifestName) bytes += ReadText(Path("c/" + name)).size();
  }
  for (const int workers : {0, 1, 4}) {
    auto report = Verify(workers);
    ASSERT_OK(report.status());
    EXPECT_EQ(report->bytes, bytes);
    EXPECT_EQ(report->files, 4u);  // two of data, objects, catalog
  }
}

TEST_F(VerifyJobTest, NamesTheDamagedFile) {
  const Array a = MakeArray(Dtype::kF32, {700, 1000}, 1);
  SaveSettings settings;
  settings.object = "{\"step\": 7}";
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1}), settings).status());
  for (const std::string& name : Names(Path("c"))) {
    if (name == kManifestName) continue;
    const std::string good = ReadText(Path("c/" + name));
    for (const size_t at : {size_t{0}, good.size() / 2, good.size() - 1}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1);
      WriteText(Path("c/" + name), bad);
      const Status status = Verify().status();
      EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << name << at;
      EXPECT_NE(status.ToString().find(name), std::string::npos)
          << status.ToString();
    }
    WriteText(Path("c/" + name), good);
  }
  EXPECT_TRUE(Verify().ok());
}

TEST_F(VerifyJobTest, NothingToCompareWithoutAManifest) {
  const Array a = MakeArray(Dtype::kF32, {2, 2}, 1);
  std::filesystem::create_directory(Path("c"));
  WriteForeign(Path("c/model.safetensors"),
               {{"a", a.dtype, a.shape, a.bytes, std::nullopt}});
  EXPECT_EQ(Verify().status().kind(), ErrorKind::kUnsupported);
}

TEST_F(VerifyJobTest, CancelStops) {
  const Array a = MakeArray(Dtype::kF32, {2, 2}, 1);
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  Job job;
  job.Cancel();
  EXPECT_EQ(RunVerifyJob(*OpenCheckpoint(Path("c")), {}, &job).status().kind(),
            ErrorKind::kCancelled);
}

}  // namespace
}  // namespace torch_ckpt
