// The write job from device memory, over the fake driver.
#include <cerrno>
#include <cstring>

#include "engine/open/header_io.h"
#include "engine/save/snapshot_job.h"
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

// The same source in host memory is the reference.
TEST_F(WriteFromDeviceTest, MemoryWithStrides) {
  struct Case {
    const char* name;
    Dims sizes, strides;  // in elements
    int64_t element;
  };
  const std::vector<Case> cases = {
      {"transposed", {700, 3000}, {1, 700}, 2},
      {"columns", {3000, 300}, {700, 1}, 2},
      {"columns_transposed", {300, 3000}, {1, 700}, 4},
      {"wide_columns", {5, 1 << 20}, {(1 << 20) + 77, 1}, 1},
      {"every_third", {400000}, {3}, 2},
      {"every_hundredth", {20000}, {100}, 8},
      {"a_column", {3000}, {700}, 4},
      {"experts", {3, 300, 500}, {300 * 1000, 1, 300}, 2},
      {"halves_of_experts", {3, 500, 300}, {600 * 500, 1, 1000}, 2},
      {"permuted", {20, 30, 40, 50}, {50, 40 * 20 * 50, 20 * 50, 1}, 1},
      {"reversed_order", {50, 40, 30, 20}, {1, 50, 2000, 60000}, 2},
      {"expanded", {70, 1000}, {0, 1}, 4},
      {"expanded_columns", {1000, 70}, {1, 0}, 4},
      {"windows", {1000, 64}, {3, 1}, 2},
      {"odd", {3, 3}, {1, 3}, 1},
      {"narrow_and_far", {40, 9, 800}, {7, 40000, 48}, 1},
  };
  std::vector<std::string> memory;
  memory.reserve(cases.size());
  uint32_t seed = 20;
  for (const Case& each : cases) {
    SourceTensor source;
    source.sizes = each.sizes;
    source.element_bytes = each.element;
    for (const int64_t stride : each.strides) {
      source.strides.push_back(stride * each.element);
    }
    memory.push_back(RandomBytes(source.Span(), seed++));
    const std::string& held = memory.back();
    source.data = reinterpret_cast<const std::byte*>(held.data());
    std::string wanted(source.bytes(), '\0');
    ASSERT_EQ(
        Gather(source, 0, std::as_writable_bytes(std::span<char>(wanted))),
        wanted.size());
    source.data = FakeCuda::OnDevice(held.data());
    source.device = 0;
    fake_.Allocate(source.data, held.size());
    Dims shape = source.sizes;
    shape[shape.size() - 1] *= each.element;  // as bytes, which are not aligned
    file_.tensors.push_back({each.name, Dtype::kU8, shape,
                             Dims::Filled(shape.size(), 0), shape,
                             sources_.size()});
    sources_.push_back(source);
    expected_[each.name] = wanted;
  }
  const std::string shift = RandomBytes(3, 19);  // elements cross pieces
  Add("a_shift", shift, DeviceSource(shift));
  for (const int workers : {1, 3}) {
    const auto written = Write(workers);
    ASSERT_TRUE(written.ok()) << written.status().ToString();
    ExpectWritten((*written)[0]);
    EXPECT_EQ(fake_.PendingCopies(), 0);
    EXPECT_EQ(fake_.LiveStreams(), 0);
  }
  std::vector<std::string> names;
  for (const WriteTensor& tensor : file_.tensors) names.push_back(tensor.name);
  Job job;
  const auto snapshot =
      RunSnapshotJob(names, sources_, {}, &Arena::Snapshots(), &job);
  ASSERT_OK(snapshot.status());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(snapshot->lease.data() +
                                                        snapshot->offsets[i]),
                          expected_[names[i]].size()),
              expected_[names[i]])
        << names[i];
  }
}

// A matrix whose rows are wanted is few calls, and nothing waits but the piece.
TEST_F(WriteFromDeviceTest, RowsAreCopiedTogether) {
  const std::string memory = RandomBytes(1 << 20, 8);
  SourceTensor source = DeviceSource(memory);
  source.sizes = {1024, 512};
  source.strides = {1024, 1};
  std::string wanted;
  for (size_t row = 0; row < 1024; ++row) {
    wanted += memory.substr(row * 1024, 512);
  }
  Add("x", wanted, source);
  const auto written = Write(1);
  ASSERT_TRUE(written.ok()) << written.status().ToString();
  ExpectWritten((*written)[0]);
  EXPECT_LE(fake_.Calls("copy"), 3);
  EXPECT_EQ(fake_.Calls("cuStreamSynchronize"), 1);
}

TEST_F(WriteFromDeviceTest, AFailedCopyOfRowsLeavesNothing) {
  const std::string memory = RandomBytes(3 * kPieceBytes, 6);
  SourceTensor source = DeviceSource(memory);
  source.sizes = {static_cast<int64_t>(kPieceBytes), 3};
  source.strides = {1, static_cast<int64_t>(kPieceBytes)};
  std::string wanted(memory.size(), '\0');
  SourceTensor on_host = source;
  on_host.data = reinterpret_cast<const std::byte*>(memory.data());
  Gather(on_host, 0, std::as_writable_bytes(std::span<char>(wanted)));
  Add("x", wanted, source);
  for (const char* call :
       {"copy", "cuMemcpy2DAsync_v2", "cuStreamSynchronize"}) {
    for (const int nth : {1, 2}) {
      Arena::Process().Trim();
      fake_.Fail(call, fake_.Calls(call) + nth, 700);
      const Status status = Write(2).status();
      EXPECT_EQ(status.kind(), ErrorKind::kIo) << call;
      EXPECT_TRUE(Names(Path("stage")).empty()) << call;
      EXPECT_EQ(fake_.PendingCopies(), 0) << call;
      fake_.Fail(call, 0x7fffffff, 0);
      Job job;
      fake_.Fail(call, fake_.Calls(call) + nth, 700);
      const Status staged =
          RunSnapshotJob({"x"}, sources_, {}, &Arena::Snapshots(), &job)
              .status();
      EXPECT_EQ(staged.kind(), ErrorKind::kIo) << call;
      EXPECT_EQ(fake_.PendingCopies(), 0) << call;
      fake_.Fail(call, 0x7fffffff, 0);
    }
  }
  const auto written = Write(2);
  ASSERT_TRUE(written.ok()) << written.status().ToString();
  ExpectWritten((*written)[0]);
}

TEST_F(WriteFromDeviceTest, AnUnknownDeviceIsRefusedBeforeAnyFile) {
  const std::string bytes = RandomBytes(64, 9);
  Add("x", bytes, DeviceSource(bytes, 5));
  EXPECT_FALSE(Write(1).ok());
  EXPECT_TRUE(Names(Path("stage")).empty());
}

}  // namespace
}  // namespace torch_ckpt
