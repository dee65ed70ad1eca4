#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "engine/open/header_io.h"
#include "engine/save/snapshot_job.h"
#include "engine/save/write_job.h"
#include "engine_test_util.h"
#include "os/probe.h"
#include "runtime/adopted.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

class WriteJobTest : public EngineDiskTest {
 protected:
  void SetUp() override {
    EngineDiskTest::SetUp();
    ASSERT_OK(Directory::Create(Path("stage")));
  }

  Result<std::vector<StagedFile>> Write(
      WriteFile file, const std::vector<SourceTensor>& sources,
      OutputOptions options = {}) {
    WritePlan plan;
    plan.staging = Path("stage");
    plan.files.push_back(std::move(file));
    plan.options = options;
    Job job;
    TC_ASSIGN_OR_RETURN(WrittenPlan written, RunWriteJob(plan, sources, &job));
    return std::move(written.files);
  }

  std::string Text(const StagedFile& file) {
    return ReadText(Path("stage/" + file.staged));
  }

  // Data of one tensor as the file has it.
  std::string Data(const StagedFile& file, const std::string& name) {
    auto stage = Directory::Open(Path("stage"));
    auto opened = stage->OpenFile(file.staged, {});
    auto header = ReadFileHeader(*opened, *opened->Stat());
    EXPECT_TRUE(header.ok()) << header.status().ToString();
    EXPECT_EQ(header->sharding.file_id, file.id);
    for (const SafetensorsEntry& entry : header->header.tensors) {
      if (entry.name != name) continue;
      return Text(file).substr(header->header.data_begin + entry.begin,
                               entry.end - entry.begin);
    }
    ADD_FAILURE() << name << " is not in the file";
    return {};
  }
};

WriteTensor WholeTensor(const std::string& name, Dtype dtype, Dims shape,
                        size_t source) {
  return {name, dtype, shape, Dims::Filled(shape.size(), 0), shape, source};
}

void ExpectDigests(const StagedFile& file, const std::string& text) {
  ASSERT_EQ(file.bytes, text.size());
  ASSERT_EQ(file.crc32c.size(),
            (text.size() + kSegmentBytes - 1) / kSegmentBytes);
  for (size_t i = 0; i < file.crc32c.size(); ++i) {
    const std::string segment = text.substr(i * kSegmentBytes, kSegmentBytes);
    EXPECT_EQ(file.crc32c[i], Crc32c(0, segment.data(), segment.size())) << i;
  }
}

TEST_F(WriteJobTest, DenseScalarAndEmpty) {
  const Array a = MakeArray(Dtype::kF32, {30, 17}, 1);
  const Array scalar = MakeArray(Dtype::kF64, {}, 2);
  const Array empty = MakeArray(Dtype::kI64, {0, 4}, 3);
  WriteFile file{"model-00001-of-00001.safetensors",
                 FileRole::kData,
                 {WholeTensor("a", Dtype::kF32, {30, 17}, 0),
                  WholeTensor("s", Dtype::kF64, {}, 1),
                  WholeTensor("e", Dtype::kI64, {0, 4}, 2)},
                 {}};
  auto written = Write(file, {BytesSource(a.bytes), BytesSource(scalar.bytes),
                              BytesSource(empty.bytes)});
  ASSERT_OK(written.status());
  ASSERT_EQ(written->size(), 1u);
  EXPECT_EQ(Data((*written)[0], "a"), a.bytes);
  EXPECT_EQ(Data((*written)[0], "s"), scalar.bytes);
  EXPECT_EQ(Data((*written)[0], "e"), "");
  ExpectDigests((*written)[0], Text((*written)[0]));
}

TEST_F(WriteJobTest, StridedSourcesOfEveryElementSize) {
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kBF16, Dtype::kF32, Dtype::kC64}) {
    // A transposed view that skips every second row of its memory.
    const Array memory = MakeArray(dtype, {26, 31}, 7);
    const int64_t unit = DtypeUnit(dtype).bytes;
    SourceTensor source;
    source.data = reinterpret_cast<const std::byte*>(memory.bytes.data());
    source.sizes = {31, 13};
    source.strides = {unit, 62 * unit};
    source.element_bytes = unit;
    std::string expected;
    for (int64_t i = 0; i < 31; ++i) {
      for (int64_t j = 0; j < 13; ++j) {
        expected.append(memory.bytes, static_cast<size_t>((62 * j + i) * unit),
                        static_cast<size_t>(unit));
      }
    }
    auto written = Write({"a.safetensors",
                          FileRole::kData,
                          {WholeTensor("t", dtype, {31, 13}, 0)},
                          {}},
                         {source});
    ASSERT_OK(written.status());
    EXPECT_EQ(Data((*written)[0], "t"), expected) << DtypeName(dtype);
  }
}

// Segments and pieces cut the elements of a strided 3-byte source.
TEST_F(WriteJobTest, PiecesCutElements) {
  constexpr int64_t kRows = 3001, kColumns = 1001;
  const std::string memory =
      MakeArray(Dtype::kU8, {kRows * kColumns * 3}, 5).bytes;
  SourceTensor source;
  source.data = reinterpret_cast<const std::byte*>(memory.data());
  source.sizes = {kColumns, kRows};
  source.strides = {3, 3 * kColumns};
  source.element_bytes = 3;
  auto written =
      Write({"a.safetensors",
             FileRole::kData,
             {WholeTensor("t", Dtype::kF6E2M3, {kColumns, kRows * 4}, 0)},
             {}},
            {source});
  ASSERT_OK(written.status());
  std::string expected;
  for (int64_t c = 0; c < kColumns; ++c) {
    for (int64_t r = 0; r < kRows; ++r) {
      expected.append(memory, static_cast<size_t>((r * kColumns + c) * 3), 3);
    }
  }
  EXPECT_EQ(Data((*written)[0], "t") == expected, true);
}

TEST_F(WriteJobTest, SubByteDtypes) {
  const Array f4 = MakeArray(Dtype::kF4, {3, 6}, 1);
  const Array f6 = MakeArray(Dtype::kF6E3M2, {5, 8}, 2);
  auto written = Write({"a.safetensors",
                        FileRole::kData,
                        {WholeTensor("f4", f4.dtype, f4.shape, 0),
                         WholeTensor("f6", f6.dtype, f6.shape, 1)},
                        {}},
                       {BytesSource(f4.bytes), BytesSource(f6.bytes)});
  ASSERT_OK(written.status());
  EXPECT_EQ(Data((*written)[0], "f4"), f4.bytes);
  EXPECT_EQ(Data((*written)[0], "f6"), f6.bytes);
}

TEST_F(WriteJobTest, RawFilesAreTheirSourcesOneAfterAnother) {
  const std::string a = "{\"x\": 1}", b = "", c(3 << 20, 'c');
  auto written =
      Write({"objects-00001.json", FileRole::kObjects, {}, {0, 1, 2}},
            {BytesSource(a), BytesSource(b), BytesSource(c)});
  ASSERT_OK(written.status());
  EXPECT_EQ(Text((*written)[0]), a + b + c);
  ExpectDigests((*written)[0], a + b + c);
  auto empty = Write({"x.bin", FileRole::kExtra, {}, {}}, {});
  ASSERT_OK(empty.status());
  EXPECT_EQ((*empty)[0].bytes, 0u);
  EXPECT_EQ(Text((*empty)[0]), "");
}

TEST_F(WriteJobTest, LargeFilesInPiecesByAnyNumberOfWorkers) {
  const Array big = MakeArray(Dtype::kF32, {5, 1 << 20}, 11);  // 20 MiB
  const Array odd = MakeArray(Dtype::kU8, {4097}, 12);
  for (const bool direct : {false, true}) {
    for (const int workers : {0, 1, 2, 5}) {
      OutputOptions options;
      options.workers = workers;
      options.direct_io = direct;
      auto written =
          Write({"a.safetensors",
                 FileRole::kData,
                 {WholeTensor("big", big.dtype, big.shape, 0),
                  WholeTensor("odd", odd.dtype, odd.shape, 1)},
                 {}},
                {BytesSource(big.bytes), BytesSource(odd.bytes)}, options);
      ASSERT_OK(written.status());
      EXPECT_TRUE(Data((*written)[0], "big") == big.bytes);
      EXPECT_TRUE(Data((*written)[0], "odd") == odd.bytes);
      ExpectDigests((*written)[0], Text((*written)[0]));
      EXPECT_EQ((*written)[0].bytes, Text((*written)[0]).size());
    }
  }
}

#ifdef TORCH_CKPT_FAULTS
// Whether a descriptor of this process for `path` has O_DIRECT.
bool IsOpenDirect(const std::string& path) {
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) != path) continue;
    const int fd = std::stoi(entry.path().filename().string());
    const int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && (flags & O_DIRECT) != 0) return true;
  }
  return false;
}

// Past the page cache where the file system can, and only if it is wanted; and
// synced only if that is.
TEST_F(WriteJobTest, OptionsDecideOverCacheAndSync) {
  const Array big = MakeArray(Dtype::kF32, {2, 1 << 20}, 11);  // 8 MiB
  const std::string scratch = Path("scratch");
  WriteText(scratch, "x");
  auto directory = Directory::Open(root());
  auto probed = ProbeDirectIo(*directory->OpenFile("scratch", {}));
  ASSERT_OK(probed.status());
  for (const bool wanted : {false, true}) {
    std::atomic<int> writes = 0, direct = 0, syncs = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (site.path.find("a.safetensors") == std::string::npos) return {};
      const std::string op = site.op;
      if (op == "fsync" || op == "fdatasync") ++syncs;
      if (op == "pwrite") {
        ++writes;
        direct += IsOpenDirect(site.path) ? 1 : 0;
      }
      return {};
    });
    OutputOptions options;
    options.direct_io = options.sync = wanted;
    const Status written = Write({"a.safetensors",
                                  FileRole::kData,
                                  {WholeTensor("big", big.dtype, big.shape, 0)},
                                  {}},
                                 {BytesSource(big.bytes)}, options)
                               .status();
    SetFaultHook(nullptr);
    ASSERT_OK(written);
    EXPECT_GT(writes, 1);
    EXPECT_EQ(direct, wanted && probed->supported ? writes.load() : 0);
    EXPECT_EQ(syncs, wanted ? 1 : 0);
  }
}
#endif

TEST_F(WriteJobTest, RefusesWhatDoesNotFitAndLeavesNothing) {
  const Array a = MakeArray(Dtype::kF32, {4, 4}, 1);
  const auto source = BytesSource(a.bytes);
  const auto expect_refused = [&](WriteFile file, ErrorKind kind) {
    auto written = Write(std::move(file), {source});
    EXPECT_EQ(written.status().kind(), kind) << written.status().ToString();
    EXPECT_TRUE(Names(Path("stage")).empty());
  };
  const std::string name = "a.safetensors";
  const auto data = FileRole::kData;
  expect_refused({name, data, {WholeTensor("t", Dtype::kF32, {5, 4}, 0)}, {}},
                 ErrorKind::kInvalidArgument);
  expect_refused({name, data, {WholeTensor("t", Dtype::kF32, {4, 4}, 1)}, {}},
                 ErrorKind::kInvalidArgument);
  // A box outside its tensor.
  expect_refused(
      {name, data, {{"t", Dtype::kF32, {4, 4}, {6, 0}, {8, 4}, 0}}, {}},
      ErrorKind::kInvalidArgument);
  // One box twice.
  expect_refused({name,
                  data,
                  {WholeTensor("t", Dtype::kF32, {4, 4}, 0),
                   WholeTensor("t", Dtype::kF32, {4, 4}, 0)},
                  {}},
                 ErrorKind::kConflict);
  expect_refused({"../x", data, {WholeTensor("t", Dtype::kF32, {4, 4}, 0)}, {}},
                 ErrorKind::kCorrupt);
}

// One file of one whole tensor.
WritePlan PlanOf(const Array& a, const std::string& staging) {
  WritePlan plan;
  plan.staging = staging;
  plan.files.push_back({"a.safetensors",
                        FileRole::kData,
                        {WholeTensor("t", a.dtype, a.shape, 0)},
                        {}});
  return plan;
}

TEST_F(WriteJobTest, ProgressCountsTheBytesOfTheFiles) {
  const Array a = MakeArray(Dtype::kF32, {1536, 1024}, 1);  // 6 MiB
  Job job;
  auto written =
      RunWriteJob(PlanOf(a, Path("stage")), {BytesSource(a.bytes)}, &job);
  ASSERT_OK(written.status());
  EXPECT_EQ(job.total(), written->files[0].bytes);
  EXPECT_EQ(job.done(), job.total());
}

TEST_F(WriteJobTest, ACancelledJobUnlinksItsFiles) {
  const Array a = MakeArray(Dtype::kF32, {1024, 1024}, 1);
  Job job;
  job.Cancel();
  auto written =
      RunWriteJob(PlanOf(a, Path("stage")), {BytesSource(a.bytes)}, &job);
  EXPECT_EQ(written.status().kind(), ErrorKind::kCancelled);
  EXPECT_TRUE(Names(Path("stage")).empty());
}

#ifdef TORCH_CKPT_FAULTS
class WriteJobFaultTest : public WriteJobTest,
                          public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(OfDataAndOfShortHeaders, WriteJobFaultTest,
                         ::testing::Bool());

TEST_P(WriteJobFaultTest, AnErrorOfAnyCallUnlinksAllFiles) {
  const bool of_headers = GetParam();
  const Array a = MakeArray(Dtype::kF32, {600, 600}, 1);
  WritePlan plan;
  plan.staging = Path("stage");
  // Headers so long that both files get a short one.
  std::vector<WriteTensor> tensors;
  for (const char* letter : {"t", "u"}) {
    std::string name(kMinStagedText / 2, letter[0]);
    tensors.push_back(WholeTensor(name, a.dtype, a.shape, 0));
  }
  for (const char* name : {"a.safetensors", "b.safetensors"}) {
    plan.files.push_back({name, FileRole::kData, tensors, {}});
  }
  const std::vector<const char*> calls =
      of_headers
          ? std::vector{"openat", "pwrite", "close"}
          : std::vector{"openat", "fallocate", "pwrite", "fsync", "close"};
  for (const char* op : calls) {
    for (const int nth : {1, 2}) {
      int seen = 0;
      SetFaultHook([&](const FaultSite& site) -> FaultAction {
        // The staging directory itself is opened first.
        if (op != std::string(site.op) ||
            site.path.find(".safetensors.") == std::string::npos ||
            site.path.ends_with(".header") != of_headers) {
          return {};
        }
        return {.sys_errno = ++seen == nth ? EDQUOT : 0};
      });
      plan.options.workers = 1;
      Job job;
      auto written = RunWriteJob(plan, {BytesSource(a.bytes)}, &job);
      SetFaultHook(nullptr);
      EXPECT_EQ(written.status().sys_errno(), EDQUOT) << op << nth;
      EXPECT_NE(written.status().file(), "");
      EXPECT_TRUE(Names(Path("stage")).empty()) << op << nth;
    }
  }
}

TEST_F(WriteJobTest, ShortWritesAndInterruptsChangeNothing) {
  const Array a = MakeArray(Dtype::kF32, {600, 600}, 1);
  int calls = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    ++calls;
    if (calls % 3 == 0 && std::string(site.op) != "close") {
      return {.sys_errno = EINTR};
    }
    return {.short_count = calls % 2 == 0};
  });
  OutputOptions options;
  options.workers = 1;
  auto written = Write({"a.safetensors",
                        FileRole::kData,
                        {WholeTensor("t", a.dtype, a.shape, 0)},
                        {}},
                       {BytesSource(a.bytes)}, options);
  SetFaultHook(nullptr);
  ASSERT_OK(written.status());
  EXPECT_EQ(Data((*written)[0], "t"), a.bytes);
}
#endif

#ifdef TORCH_CKPT_FAULTS

TEST_F(WriteJobTest, StagedTensorsAreWrittenFromWhereTheyAre) {
  // Odd ones at the end, where the pieces have to be put together.
  std::vector<Array> arrays;
  for (uint32_t i = 0; i < 40; ++i) {
    arrays.push_back(MakeArray(Dtype::kU8, {i % 4 == 3 ? 777 : 512 << 10}, i));
  }
  std::vector<SourceTensor> sources;
  std::vector<std::string> names;
  WriteFile file{"model-00001-of-00001.safetensors", FileRole::kData, {}, {}};
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::string name = "t" + std::to_string(i);
    sources.push_back(BytesSource(arrays[i].bytes));
    names.push_back(name);
    file.tensors.push_back(WholeTensor(name, Dtype::kU8, arrays[i].shape, i));
  }
  Job staging;
  SnapshotOptions shared;
  shared.kind = MemoryKind::kShared;
  Arena theirs(64 << 20);  // of the process that has staged
  auto region =
      RunSnapshotJob(names, sources, {}, &Arena::Snapshots(), &staging);
  auto sent = RunSnapshotJob(names, sources, shared, &theirs, &staging);
  ASSERT_OK(region.status());
  ASSERT_OK(sent.status());
  auto adopted = AdoptedMemory::Process().Adopt(sent->lease.shared()->fd,
                                                sent->lease.shared()->offset,
                                                sent->lease.size());
  ASSERT_OK(adopted.status());
  for (const std::byte* memory : {region->lease.data(), adopted->get()}) {
    for (size_t i = 0; i < sources.size(); ++i) {
      sources[i].data = memory + region->offsets[i];
    }
    int in_place = 0, copied = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (std::string_view(site.op) == "pwrite" &&
          site.path.find("safetensors") != std::string::npos) {
        ++(Arena::Process().Stats().leased == 0 ? in_place : copied);
      }
      return {};
    });
    OutputOptions options;
    options.workers = 1;
    auto written = Write(file, sources, options);
    SetFaultHook(nullptr);
    ASSERT_OK(written.status());
    ExpectDigests((*written)[0], Text((*written)[0]));
    for (size_t i = 0; i < arrays.size(); ++i) {
      EXPECT_TRUE(Data((*written)[0], names[i]) == arrays[i].bytes) << i;
    }
    // The piece with the header and the last one.
    EXPECT_EQ(copied, 2);
    EXPECT_GE(in_place, 2);
  }
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
