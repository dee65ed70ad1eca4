// The write job from device memory, over the fake driver.
#include <cerrno>
#include <cstring>

#include "engine/open/header_io.h"
#include "engine/save/write_job.h"
#include "fake_cuda.h"
#include "final_test_util.h"
#include "runtime/crc32c.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

class WriteFromDeviceTest : public EngineTest {
 protected:
  static void SetUpTestSuite() { FakeCuda::UseForProcess(); }

  void SetUp() override {
    EngineTest::SetUp();
    ASSERT_OK(Directory::Create(Path("stage")));
  }

  SourceTensor DeviceSource(const std::string& bytes, int device = 0) {
    SourceTensor source = BytesSource(bytes);
    source.data = FakeCuda::OnDevice(bytes.data());
    source.device = device;
    return source;
  }

  void Add(const std::string& name, const std::string& bytes,
           SourceTensor source) {
    const Dims shape = source.sizes;
    file_.tensors.push_back({name, Dtype::kU8, shape,
                             Dims::Filled(shape.size(), 0), shape,
                             sources_.size()});
    sources_.push_back(source);
    expected_[name] = bytes;
  }

  Result<std::vector<StagedFile>> Write(int workers) {
    WritePlan plan;
    plan.staging = Path("stage");
    file_.name = "model-00001-of-00001.safetensors";
    plan.files.push_back(file_);
    plan.options.workers = workers;
    Job job;
    TC_ASSIGN_OR_RETURN(WrittenPlan written, RunWriteJob(plan, sources_, &job));
    return std::move(written.files);
  }

  void ExpectWritten(const StagedFile& file) {
    const std::string text = ReadText(Path("stage/" + file.staged));
    for (size_t i = 0; i < file.crc32c.size(); ++i) {
      const std::string segment = text.substr(i * kSegmentBytes, kSegmentBytes);
      EXPECT_EQ(file.crc32c[i], Crc32c(0, segment.data(), segment.size()));
    }
    auto stage = Directory::Open(Path("stage"));
    auto opened = stage->OpenFile(file.staged, {});
    auto header = ReadFileHeader(*opened, *opened->Stat());
    ASSERT_TRUE(header.ok()) << header.status().ToString();
    for (const SafetensorsEntry& entry : header->header.tensors) {
      EXPECT_EQ(text.substr(header->header.data_begin + entry.begin,
                            entry.end - entry.begin),
                expected_[entry.name])
          << entry.name;
    }
    EXPECT_EQ(header->header.tensors.size(), expected_.size());
  }

  FakeCuda fake_;
  WriteFile file_;
  std::vector<SourceTensor> sources_;
  std::map<std::string, std::string> expected_;
};

TEST_F(WriteFromDeviceTest, HostAndDeviceMemoryInOneFile) {
  const std::string large = RandomBytes(2 * kPieceBytes + 4096 + 7, 1);
  const std::string host = RandomBytes(5000, 2);
  const std::string other = RandomBytes(kPieceBytes, 3);
  std::vector<std::string> small;
  for (uint32_t i = 0; i < 50; ++i) small.push_back(RandomBytes(i * 13, i));
  Add("large", large, DeviceSource(large));
  Add("host", host, BytesSource(host));
  Add("other", other, DeviceSource(other, 1));
  for (size_t i = 0; i < small.size(); ++i) {
    Add("small" + std::to_string(i), small[i], DeviceSource(small[i]));
  }
  for (const int workers : {1, 2, 3}) {
    const auto written = Write(workers);
    ASSERT_TRUE(written.ok()) << written.status().ToString();
    ExpectWritten((*written)[0]);
    EXPECT_EQ(fake_.LiveStreams(), 0);
  }
  // A piece waits for its devices once, however many tensors are in it.
  EXPECT_LE(fake_.Calls("cuStreamSynchronize"), 3 * 4 * 2);
  EXPECT_GT(fake_.LockedRanges(), 0);
}

// Into final files, some of it cast on the way: what a device copies is cast
// from where it was copied to.
TEST_F(WriteFromDeviceTest, FinalFilesWithCasts) {
  auto stage = Directory::Open(Path("stage"));
  ASSERT_OK(stage.status());
  const int64_t count = static_cast<int64_t>(kPieceBytes) / 2 + 1001;
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i % 1000) / 7;
  }
  const std::string floats(reinterpret_cast<const char*>(values.data()),
                           values.size() * sizeof(float));
  const std::string plain = RandomBytes(5003, 1);
  std::string cast(values.size() * 2, '\0');
  CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()),
               Dtype::kBF16, reinterpret_cast<std::byte*>(cast.data()),
               values.size());
  auto list =
      StageFinalFiles(*stage,
                      {{"cast", Dtype::kBF16, {count}, {}},
                       {"gathered", Dtype::kBF16, {count}, {{-1, 0, count}}},
                       {"plain", Dtype::kU8, {5003}, {}}},
                      {}, {}, true);
  ASSERT_OK(list.status());
  WritePlan plan;
  plan.staging = Path("stage");
  for (const std::string name : {"cast", "gathered"}) {
    plan.final_tensors.push_back({name,
                                  Dtype::kF32,
                                  {count},
                                  {0},
                                  {count},
                                  sources_.size(),
                                  Dtype::kBF16});
    SourceTensor source = DeviceSource(floats);
    source.sizes = {count};
    source.strides = {4};
    source.element_bytes = 4;
    sources_.push_back(source);
  }
  plan.final_tensors.push_back(
      {"plain", Dtype::kU8, {5003}, {0}, {5003}, sources_.size()});
  sources_.push_back(DeviceSource(plain));
  Job job;
  auto written = RunWriteJob(plan, sources_, &job);
  ASSERT_OK(written.status());
  RankFinals rank;
  rank.files = written->final_files;
  if (written->spill) rank.spills.push_back(*written->spill);
  auto files = RunAssembleJob(*stage, *list, {rank}, {}, &job);
  ASSERT_OK(files.status());
  expected_ = {{"cast", cast}, {"gathered", cast}, {"plain", plain}};
  ExpectWritten((*files)[0]);
}

TEST_F(WriteFromDeviceTest, BuffersAreLockedByTheFirstJobOnly) {
  const std::string bytes = RandomBytes(3 * kPieceBytes, 4);
  Add("x", bytes, DeviceSource(bytes));
  ASSERT_OK(Write(1).status());
  const int locks = fake_.Calls("cuMemHostRegister_v2");
  ASSERT_OK(Write(1).status());
  EXPECT_EQ(fake_.Calls("cuMemHostRegister_v2"), locks);
}

TEST_F(WriteFromDeviceTest, WritesWithoutLockedMemory) {
  Arena::Process().Trim();
  fake_.Fail("cuMemHostRegister_v2", 1, 2);
  const std::string bytes = RandomBytes(kPieceBytes + 1, 5);
  Add("x", bytes, DeviceSource(bytes));
  const auto written = Write(2);
  ASSERT_TRUE(written.ok()) << written.status().ToString();
  EXPECT_EQ(fake_.LockedRanges(), 0);
  ExpectWritten((*written)[0]);
}

TEST_F(WriteFromDeviceTest, AFailedCopyNamesTheFileAndLeavesNothing) {
  const std::string bytes = RandomBytes(3 * kPieceBytes, 6);
  Add("x", bytes, DeviceSource(bytes));
  for (const char* call : {"copy", "cuStreamSynchronize", "cuStreamCreate"}) {
    for (const int nth : {1, 2}) {
      Arena::Process().Trim();  // its unlocks would be counted
      fake_.Fail(call, fake_.Calls(call) + nth, 700);
      const Status status = Write(2).status();
      if (std::string(call) != "cuStreamCreate" || nth == 1) {
        EXPECT_EQ(status.kind(), ErrorKind::kIo) << call;
        EXPECT_EQ(status.sys_errno(), EIO) << call;
        EXPECT_EQ(status.file(), "model-00001-of-00001.safetensors") << call;
        EXPECT_TRUE(Names(Path("stage")).empty()) << call;
      }
      fake_.Fail(call, 0x7fffffff, 0);
    }
  }
}

TEST_F(WriteFromDeviceTest, NoCopyRunsOnceAWriteHasFailed) {
  const std::string bytes = RandomBytes(kPieceBytes, 7);
  Add("x", bytes, DeviceSource(bytes));
  // The second copy of a piece fails when the first has begun.
  fake_.Fail("copy", 2, 700);
  EXPECT_FALSE(Write(1).ok());
  EXPECT_GE(fake_.Calls("cuStreamSynchronize"), 1);
  EXPECT_EQ(fake_.PendingCopies(), 0);
}

TEST_F(WriteFromDeviceTest, StridedDeviceMemoryIsRefused) {
  const std::string bytes = RandomBytes(64, 8);
  SourceTensor source = DeviceSource(bytes);
  source.sizes = {4, 8};
  source.strides = {1, 4};
  Add("x", bytes, source);
  const Status status = Write(1).status();
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
  EXPECT_NE(status.message().find("not contiguous"), std::string::npos);
  EXPECT_EQ(fake_.Calls("copy"), 0);
}

TEST_F(WriteFromDeviceTest, AnUnknownDeviceIsRefusedBeforeAnyFile) {
  const std::string bytes = RandomBytes(64, 9);
  Add("x", bytes, DeviceSource(bytes, 5));
  EXPECT_FALSE(Write(1).ok());
  EXPECT_TRUE(Names(Path("stage")).empty());
}

}  // namespace
}  // namespace torch_ckpt
