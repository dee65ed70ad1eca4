// Staging: every byte once, in the order of the file, in leased memory.
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "engine/save/snapshot_job.h"
#include "engine_test_util.h"
#include "fake_cuda.h"
#include "format/safetensors/safetensors.h"
#include "os/fault.h"
#include "os/memory.h"
#include "plan/layout.h"
#include "plan/runs.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class SnapshotJobTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { FakeCuda::UseForProcess(); }

  void Add(const std::string& name, SourceTensor source) {
    names_.push_back(name);
    sources_.push_back(source);
  }

  Result<Snapshot> Stage(int workers = 3) {
    SnapshotOptions options;
    options.workers = workers;
    return RunSnapshotJob(names_, sources_, options, &arena_, &job_);
  }

  // The bytes of source `i` in row-major order, element by element.
  std::string Expected(size_t i) {
    const SourceTensor& source = sources_[i];
    std::string out;
    for (int64_t n = 0; n < source.sizes.Product(); ++n) {
      int64_t rest = n, at = 0;
      for (int d = source.sizes.size() - 1; d >= 0; --d) {
        at += rest % source.sizes[d] * source.strides[d];
        rest /= source.sizes[d];
      }
      out.append(reinterpret_cast<const char*>(source.data) + at,
                 static_cast<size_t>(source.element_bytes));
    }
    return out;
  }

  void ExpectStaged(const Snapshot& region) {
    for (size_t i = 0; i < sources_.size(); ++i) {
      const std::string expected = Expected(i);
      ASSERT_LE(region.offsets[i] + expected.size(), region.bytes);
      EXPECT_EQ(std::memcmp(region.lease.data() + region.offsets[i],
                            expected.data(), expected.size()),
                0)
          << names_[i];
      EXPECT_EQ(
          region.offsets[i] % static_cast<uint64_t>(sources_[i].element_bytes),
          0u);
    }
  }

  Arena arena_{256 * kMiB, IdleMemory::kReplaced};
  Job job_;
  std::vector<std::string> names_;
  std::vector<SourceTensor> sources_;
};

SourceTensor Dense(const std::string& bytes, Dims sizes, int64_t unit) {
  SourceTensor source = BytesSource(bytes);
  source.sizes = sizes;
  source.element_bytes = unit;
  source.strides = DenseStrides(sizes, unit);
  return source;
}

TEST_F(SnapshotJobTest, IntoMemoryOfTheCaller) {
  const std::string a = RandomBytes(3 * kMiB, 1), b = RandomBytes(4 * 5001, 2);
  Add("a", BytesSource(a));
  Add("b", Dense(b, {3, 1667}, 4));
  sources_[1].sizes = {1667, 3};  // transposed
  std::swap(sources_[1].strides[0], sources_[1].strides[1]);
  Add("rows", Dense(a, {16}, 1));  // lies in a
  SnapshotOptions options;
  const uint64_t bytes = a.size() + b.size();
  std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(kRegionAlignment, 4 * kMiB)),
      &std::free);
  const auto stage = [&](size_t from, size_t size) {
    options.region = MutableByteSpan(memory.get() + from, size);
    return RunSnapshotJob(names_, sources_, options, &arena_, &job_);
  };
  std::memset(memory.get(), 7, 4 * kMiB);
  for (const auto& [from, size] :
       {std::pair<size_t, size_t>{0, bytes - 1}, {1, bytes}, {32, bytes}}) {
    const Status status = stage(from, size).status();
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(status.message().find("the region"), std::string::npos);
  }
  EXPECT_EQ(std::count(memory.get(), memory.get() + 4 * kMiB, std::byte{7}),
            static_cast<int64_t>(4 * kMiB));
  auto staged = stage(64, bytes);
  ASSERT_OK(staged.status());
  EXPECT_EQ(staged->bytes, bytes);
  EXPECT_EQ(staged->lease.size(), 0u);
  EXPECT_EQ(staged->offsets[2], staged->offsets[0]);
  for (size_t i = 0; i < sources_.size(); ++i) {
    const std::string expected = Expected(i);
    EXPECT_EQ(std::memcmp(memory.get() + 64 + staged->offsets[i],
                          expected.data(), expected.size()),
              0)
        << names_[i];
  }
  EXPECT_EQ(memory.get()[63], std::byte{7});
  EXPECT_EQ(memory.get()[64 + bytes], std::byte{7});
}

TEST_F(SnapshotJobTest, StandAsTheyWillInTheFile) {
  std::vector<std::string> memory;
  std::vector<SafetensorsEntry> entries;
  std::mt19937 random(5);
  const Dtype dtypes[] = {Dtype::kF64, Dtype::kF32, Dtype::kBF16, Dtype::kU8};
  memory.reserve(200);
  for (uint32_t i = 0; i < 200; ++i) {
    const Dtype dtype = dtypes[random() % 4];
    const auto count = static_cast<int64_t>(
        random() % 3 == 0 ? 4096 * (random() % 30) : random() % 5000);
    memory.push_back(MakeArray(dtype, {count}, i).bytes);
    const std::string name = "t" + std::to_string(i);
    entries.push_back({name, dtype, {count}, 0, 0});
    Add(name, Dense(memory.back(), {count}, DtypeBits(dtype) / 8));
  }
  auto region = Stage();
  ASSERT_OK(region.status());
  ExpectStaged(*region);
  const std::vector<uint32_t> order = LayOutFile(&entries);
  for (size_t n = 0; n < order.size(); ++n) {
    if (entries[n].begin == entries[n].end) continue;
    EXPECT_EQ(region->offsets[order[n]], entries[n].begin);
  }
  EXPECT_EQ(job_.done(), job_.total());
  EXPECT_EQ(job_.done(), region->bytes);
}

TEST_F(SnapshotJobTest, StridedSourcesBecomeDense) {
  const std::string memory = RandomBytes(64 * 48 * 4, 1);
  Add("transposed", {AsBytes(memory).data(), {48, 64}, {4, 48 * 4}, 4, -1});
  Add("columns", {AsBytes(memory).data() + 8, {64, 10}, {48 * 4, 4}, 4, -1});
  Add("expanded", {AsBytes(memory).data(), {100, 48}, {0, 4}, 4, -1});
  Add("scalar", {AsBytes(memory).data() + 16, {}, {}, 8, -1});
  Add("empty", {nullptr, {0, 7}, {28, 4}, 4, -1});
  auto region = Stage();
  ASSERT_OK(region.status());
  ExpectStaged(*region);
}

TEST_F(SnapshotJobTest, SharedMemoryIsStagedOnce) {
  const std::string memory = RandomBytes(1000 * 4, 1);
  Add("tied", Dense(memory, {1000}, 4));
  Add("whole", Dense(memory, {10, 100}, 4));
  SourceTensor row = Dense(memory, {100}, 4);
  row.data += 400;
  Add("row", row);
  SourceTensor odd = Dense(memory, {10}, 8);  // inside, but not aligned there
  odd.data += 4;
  Add("odd", odd);
  const SourceTensor transposed{
      AsBytes(memory).data(), {100, 10}, {4, 400}, 4, -1};
  Add("transposed", transposed);
  Add("transposed again", transposed);
  auto region = Stage();
  ASSERT_OK(region.status());
  ExpectStaged(*region);
  EXPECT_EQ(region->offsets[0], region->offsets[1]);
  EXPECT_EQ(region->offsets[2], region->offsets[0] + 400);
  EXPECT_EQ(region->offsets[4], region->offsets[5]);
  EXPECT_LT(region->bytes, 2 * memory.size() + 200);
}

// Whatever stands before it, a container begins where its parts are aligned.
TEST_F(SnapshotJobTest, PartsOfLargerElementsAreAligned) {
  const std::string memory = RandomBytes(64, 1), small = RandomBytes(3, 2);
  for (const char* name : {"a", "c"}) {
    names_.clear();
    sources_.clear();
    Add(name, Dense(small, {3}, 1));
    Add("b", Dense(memory, {64}, 1));
    SourceTensor part = Dense(memory, {4}, 8);
    part.data += 8;
    Add("part", part);
    auto region = Stage();
    ASSERT_OK(region.status());
    ExpectStaged(*region);
    EXPECT_EQ(region->offsets[2] % 8, 0u) << name;
    EXPECT_EQ(region->offsets[2], region->offsets[1] + 8) << name;
  }
}

TEST_F(SnapshotJobTest, DeviceMemoryToo) {
  FakeCuda fake;
  const std::string large = RandomBytes(5 * kMiB + 3, 1);
  const std::string host = RandomBytes(3 * kMiB, 2);
  SourceTensor device = Dense(large, {static_cast<int64_t>(large.size())}, 1);
  device.data = FakeCuda::OnDevice(large.data());
  device.device = 0;
  Add("device", device);
  Add("host", Dense(host, {static_cast<int64_t>(host.size())}, 1));
  auto region = Stage(1);
  ASSERT_OK(region.status());
  EXPECT_EQ(fake.PendingCopies(), 0);
  EXPECT_EQ(std::memcmp(region->lease.data() + region->offsets[0], large.data(),
                        large.size()),
            0);
  EXPECT_EQ(std::memcmp(region->lease.data() + region->offsets[1], host.data(),
                        host.size()),
            0);
  EXPECT_EQ(fake.Calls("cuStreamSynchronize"), 1);
  EXPECT_EQ(job_.done(), job_.total());
  region->lease.Release();
  arena_.Trim();
}

TEST_F(SnapshotJobTest, ManyTensorsOfDevicesAreFewOperations) {
  FakeCuda fake;
  std::vector<std::string> memory;
  std::mt19937 random(7);
  memory.reserve(600);
  for (uint32_t i = 0; i < 600; ++i) {
    memory.push_back(RandomBytes(random() % 9000, i));
    const auto size = static_cast<int64_t>(memory.back().size());
    SourceTensor source = Dense(memory.back(), {size}, 1);
    source.device = static_cast<int>(i % 3) - 1;
    if (source.device >= 0) source.data = FakeCuda::OnDevice(source.data);
    Add("t" + std::to_string(i), source);
  }
  auto region = Stage();
  ASSERT_OK(region.status());
  EXPECT_EQ(fake.Calls("cuMemcpyBatchAsync"), 2);  // one a device
  EXPECT_EQ(fake.Calls("cuMemcpyDtoHAsync_v2"), 0);
  EXPECT_EQ(fake.Calls("cuStreamSynchronize"), 2);
  for (size_t i = 0; i < memory.size(); ++i) {
    EXPECT_EQ(std::memcmp(region->lease.data() + region->offsets[i],
                          memory[i].data(), memory[i].size()),
              0)
        << names_[i];
  }
  EXPECT_EQ(job_.done(), job_.total());
  region->lease.Release();
  arena_.Trim();
}

#ifdef TORCH_CKPT_FAULTS
// Of memory that nobody has touched each worker takes, locks and fills a piece
// at a time.
TEST_F(SnapshotJobTest, FreshMemoryIsTakenAndLockedPieceByPiece) {
  FakeCuda fake;
  const std::string memory = RandomBytes(24 * kMiB, 1);
  SourceTensor device = Dense(memory, {24 * static_cast<int64_t>(kMiB)}, 1);
  device.data = FakeCuda::OnDevice(memory.data());
  device.device = 0;
  Add("device", device);
  const std::string populate = std::to_string(internal::kPopulateWrite);
  std::vector<std::pair<int, int>> seen;  // calls so far: locks, copies
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) == "madvise" && site.path == populate) {
      seen.emplace_back(fake.Calls("cuMemHostRegister_v2"), fake.Calls("copy"));
    }
    return {};
  });
  auto region = Stage(1);
  SetFaultHook(nullptr);
  ASSERT_OK(region.status());
  const std::vector<std::pair<int, int>> expected = {{0, 0}, {2, 2}, {4, 4},
                                                     {6, 6}, {8, 8}, {10, 10}};
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(std::memcmp(region->lease.data(), memory.data(), memory.size()), 0);
  region->lease.Release();
  arena_.Trim();
}

TEST_F(SnapshotJobTest, AllWorkersTakeFreshMemory) {
  const std::string memory = RandomBytes(24 * kMiB, 1);
  Add("t", Dense(memory, {24 * static_cast<int64_t>(kMiB)}, 1));
  const std::string populate = std::to_string(internal::kPopulateWrite);
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::thread::id> threads;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (std::string(site.op) != "madvise" || site.path != populate) return {};
    std::unique_lock<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
    came.notify_all();
    // All three are in here at once.
    came.wait_for(lock, std::chrono::seconds(120),
                  [&] { return threads.size() == 3; });
    return {};
  });
  auto region = Stage(3);
  EXPECT_EQ(threads.size(), 3u);
  ASSERT_OK(region.status());
  ExpectStaged(*region);
  // For prepare, too; what is prepared serves the next state as it is.
  region->lease.Release();
  arena_.Trim();
  threads.clear();
  ASSERT_OK(PrepareRegion(24 * kMiB, {.workers = 3}, &arena_));
  EXPECT_EQ(threads.size(), 3u);
  EXPECT_EQ(arena_.Stats().mapped, 24 * kMiB);
  EXPECT_EQ(arena_.Stats().leased, 0u);
  threads.clear();
  auto next = Stage(3);
  SetFaultHook(nullptr);
  ASSERT_OK(next.status());
  ExpectStaged(*next);
  EXPECT_TRUE(threads.empty());
}

TEST_F(SnapshotJobTest, NoMemoryOnTheWayIsAnErrorAndLeavesNothingLeased) {
  const std::string memory = RandomBytes(24 * kMiB, 1);
  Add("t", Dense(memory, {24 * static_cast<int64_t>(kMiB)}, 1));
  const std::string populate = std::to_string(internal::kPopulateWrite);
  std::atomic<int> calls = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool gives =
        std::string(site.op) == "madvise" && site.path == populate;
    return {.sys_errno = gives && ++calls == 4 ? ENOMEM : 0};
  });
  const Status status = Stage().status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(arena_.Stats().leased, 0u);
  auto region = Stage();
  ASSERT_OK(region.status());
  ExpectStaged(*region);
}
#endif

TEST_F(SnapshotJobTest, ACopyThatIsRefusedNamesItsTensor) {
  FakeCuda fake;
  std::vector<std::string> memory;
  memory.reserve(40);
  for (uint32_t i = 0; i < 40; ++i) {
    memory.push_back(RandomBytes(100, i));
    SourceTensor source = Dense(memory.back(), {100}, 1);
    if (i != 23) source.data = FakeCuda::OnDevice(source.data);
    source.device = 0;
    Add("t" + std::to_string(i), source);
  }
  const Status status = Stage().status();
  EXPECT_EQ(status.kind(), ErrorKind::kIo);
  EXPECT_EQ(status.tensor(), "t23");
  EXPECT_EQ(fake.PendingCopies(), 0);
  EXPECT_EQ(fake.LiveStreams(), 0);
  EXPECT_EQ(arena_.Stats().leased, 0u);
  arena_.Trim();
}

TEST_F(SnapshotJobTest, ViewsOfOneBufferAreOneCopy) {
  FakeCuda fake;
  const std::string memory = RandomBytes(60 * 512, 1);
  const std::byte* device = FakeCuda::OnDevice(memory.data());
  fake.Allocate(device, memory.size());
  for (int64_t i = 0; i < 60; ++i) {
    const std::string name = std::to_string(100 + i);  // in the file's order
    Add(name, {device + i * 512, {128}, {4}, 4, 0});
  }
  auto region = Stage();
  ASSERT_OK(region.status());
  EXPECT_EQ(fake.Calls("copy"), 1);
  EXPECT_EQ(std::memcmp(region->lease.data(), memory.data(), memory.size()), 0);
  region->lease.Release();
  arena_.Trim();
}

TEST_F(SnapshotJobTest, AFailedDeviceCopyIsAnErrorAndLeavesNothingLeased) {
  FakeCuda fake;
  const std::string large = RandomBytes(9 * kMiB, 1);
  for (const char* call : {"copy", "cuStreamSynchronize"}) {
    SourceTensor device = Dense(large, {static_cast<int64_t>(large.size())}, 1);
    device.data = FakeCuda::OnDevice(large.data());
    device.device = 0;
    names_.clear();
    sources_.clear();
    Add("device", device);
    fake.Fail(call, fake.Calls(call) + 1, 700);
    EXPECT_FALSE(Stage().ok()) << call;
    EXPECT_EQ(fake.PendingCopies(), 0);
    EXPECT_EQ(arena_.Stats().leased, 0u);
    fake.Fail(call, 0x7fffffff, 0);
  }
  arena_.Trim();
}

TEST_F(SnapshotJobTest, WhatTheBudgetDoesNotAllowIsRefused) {
  const std::string memory = RandomBytes(3 * kMiB, 1);
  Add("t", Dense(memory, {3 * static_cast<int64_t>(kMiB)}, 1));
  arena_.SetBudget(2 * kMiB);
  EXPECT_EQ(Stage().status().kind(), ErrorKind::kExhausted);
  arena_.SetBudget(6 * kMiB);
  auto first = Stage();
  ASSERT_OK(first.status());
  EXPECT_EQ(Stage().status().kind(), ErrorKind::kExhausted);
  first->lease.Release();
  auto second = Stage();
  ASSERT_OK(second.status());
  ExpectStaged(*second);
}

TEST_F(SnapshotJobTest, CancelledAndNothingIsLeased) {
  const std::string memory = RandomBytes(9 * kMiB, 1);
  Add("t", Dense(memory, {9 * static_cast<int64_t>(kMiB)}, 1));
  job_.Cancel();
  EXPECT_EQ(Stage().status().kind(), ErrorKind::kCancelled);
  EXPECT_EQ(arena_.Stats().leased, 0u);
}

TEST_F(SnapshotJobTest, NothingToStage) {
  auto region = Stage();
  ASSERT_OK(region.status());
  EXPECT_EQ(region->bytes, 0u);
}

}  // namespace
}  // namespace torch_ckpt
