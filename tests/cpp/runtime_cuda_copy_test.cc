// Copies from devices, over drivers with batches, without, and with batches
// that they refuse: what arrives is the same.
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fake_cuda.h"
#include "runtime/arena.h"
#include "runtime/cuda_copy.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class CudaCopyTest : public ::testing::Test {
 protected:
  explicit CudaCopyTest(const char* path = FakeCuda::Path())
      : fake_(path), path_(path) {}

  void SetUp() override {
    auto loaded = CudaDriver::Load(path_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    driver_ = std::move(loaded).value();
    for (int ordinal = 0; ordinal < 2; ++ordinal) {
      auto opened = CudaDevice::Open(driver_.get(), ordinal);
      ASSERT_TRUE(opened.ok()) << opened.status().ToString();
      devices_.push_back(std::move(opened).value());
    }
  }

  CudaDevice* device(size_t ordinal = 0) { return devices_[ordinal].get(); }

  // `count` copies of a byte or two from every third on, none of which goes on
  // where another ends. No two batches have the same sizes.
  static size_t ScatteredSize(size_t i) { return i % 3 == 0 ? 2 : 1; }
  void AddScattered(CudaCopies* copies, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      copies->Add(0, device(), FakeCuda::OnDevice(&memory_[3 * i]),
                  {to_ + 3 * i, ScatteredSize(i)});
    }
  }

  // Begins the copies and says what was refused, if anything was.
  Status Begin(CudaCopies* copies, const std::byte** failed = nullptr) {
    const std::byte* at = nullptr;
    Status status = copies->Begin(0, &at);
    if (failed != nullptr) *failed = at;
    return status;
  }

  Status BeginAndWait(CudaCopies* copies) {
    Status status = Begin(copies);
    const Status waited = copies->Wait(0);
    return status.ok() ? waited : status;
  }

  FakeCuda fake_;
  const std::string path_;
  std::unique_ptr<const CudaDriver> driver_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
  std::string memory_ = std::string(8 * kMiB, 'x');
  Arena arena_{32 * kMiB};
  const Result<ArenaLease> lease_ = arena_.Lease(8 * kMiB);
  std::byte* const to_ = lease_.ok() ? (*lease_).data() : nullptr;
};

TEST_F(CudaCopyTest, ManyCopiesAreFewCalls) {
  CudaCopies copies(1);
  AddScattered(&copies, 1000);
  ASSERT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("cuMemcpyBatchAsync"), 1);
  std::memset(to_, '.', 7500);
  for (size_t i = 0; i < 7500; ++i) memory_[i] = static_cast<char>(i % 251);
  AddScattered(&copies, 2500);  // more than any call gets
  ASSERT_TRUE(BeginAndWait(&copies).ok());
  for (size_t i = 0; i < 7500; ++i) {
    const bool copied = i % 3 < ScatteredSize(i / 3);
    ASSERT_EQ(static_cast<char>(to_[i]), copied ? memory_[i] : '.') << i;
  }
  EXPECT_EQ(fake_.Calls("cuMemcpyBatchAsync"), 1 + 3);
  EXPECT_EQ(fake_.Calls("copy"), 1000 + 2500);
  EXPECT_EQ(fake_.Calls("cuMemcpyDtoHAsync_v2"), 0);
  EXPECT_EQ(fake_.Calls("cuStreamCreate"), 1);
}

TEST_F(CudaCopyTest, ADriverThatRefusesBatchesIsAskedOnce) {
  for (const int refusal : {500, 801}) {
    fake_.Fail("cuMemcpyBatchAsync", 1, refusal);
    auto opened = CudaDevice::Open(driver_.get(), 0);
    ASSERT_TRUE(opened.ok());
    devices_[0] = std::move(opened).value();
    const int asked = fake_.Calls("cuMemcpyBatchAsync");
    const int copied = fake_.Calls("cuMemcpyDtoHAsync_v2");
    CudaCopies copies(1);
    for (int i = 0; i < 2; ++i) {
      AddScattered(&copies, 1500);
      EXPECT_TRUE(BeginAndWait(&copies).ok());
    }
    EXPECT_EQ(fake_.Calls("cuMemcpyBatchAsync"), asked + 1);
    EXPECT_EQ(fake_.Calls("cuMemcpyDtoHAsync_v2"), copied + 3000);
  }
}

TEST_F(CudaCopyTest, ABatchThatFailsOtherwiseIsCopiedOneByOne) {
  fake_.Fail("cuMemcpyBatchAsync", 2, 1);
  CudaCopies copies(1);
  AddScattered(&copies, 1500);
  EXPECT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("cuMemcpyDtoHAsync_v2"), 1500 - 1024);
  EXPECT_EQ(static_cast<char>(to_[3 * 1499]), 'x');
  fake_.Fail("cuMemcpyBatchAsync", 0x7fffffff, 0);
  AddScattered(&copies, 10);
  EXPECT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("cuMemcpyBatchAsync"), 3);  // they are used again
  EXPECT_EQ(fake_.Calls("cuMemcpyDtoHAsync_v2"), 1500 - 1024);
}

TEST_F(CudaCopyTest, TheCopyInTheMiddleThatIsRefusedIsNamed) {
  CudaCopies copies(1);
  AddScattered(&copies, 1500);
  const std::byte host{};
  copies.Add(0, device(), &host, {to_ + kMiB, 1});
  AddScattered(&copies, 10);
  const std::byte* failed = nullptr;
  const Status status = Begin(&copies, &failed);
  EXPECT_EQ(status.kind(), ErrorKind::kIo);
  EXPECT_NE(status.message().find("cuMemcpyDtoHAsync on device 0"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(failed, &host);
  EXPECT_GT(fake_.PendingCopies(), 0);  // those before it have begun
  EXPECT_TRUE(copies.Wait(0).ok());
  EXPECT_EQ(fake_.PendingCopies(), 0);
  // And those after it never do.
  const int copied = fake_.Calls("copy");
  EXPECT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("copy"), copied);
}

TEST_F(CudaCopyTest, NeighboursAreOneCopyUpToABorder) {
  const std::byte* from = FakeCuda::OnDevice(memory_.data());
  fake_.Allocate(from, memory_.size());
  CudaCopies copies(1);
  for (size_t at = 0; at < 5 * kMiB; at += 4096) {
    copies.Add(0, device(), from + at, {to_ + at, 4096});
  }
  ASSERT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("copy"), 3);
  EXPECT_EQ(fake_.Calls("cuMemGetAddressRange_v2"), 1);
  EXPECT_EQ(std::memcmp(to_, memory_.data(), 5 * kMiB), 0);
}

TEST_F(CudaCopyTest, WhatIsANeighbourOnOneSideOnlyIsACopyOfItsOwn) {
  const std::byte* from = FakeCuda::OnDevice(memory_.data());
  fake_.Allocate(from, memory_.size());
  CudaCopies copies(1);
  copies.Add(0, device(), from, {to_, 100});
  copies.Add(0, device(), from + 100, {to_ + 101, 100});  // padded here
  copies.Add(0, device(), from + 201, {to_ + 201, 100});  // and there
  copies.Add(0, device(), from + 201, {to_ + 301, 100});  // the same again
  ASSERT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("copy"), 4);
}

TEST_F(CudaCopyTest, NoCopyReachesIntoTwoAllocations) {
  const std::byte* from = FakeCuda::OnDevice(memory_.data());
  for (const size_t at : {0, 1000, 2000}) {
    fake_.Allocate(from + at, at == 2000 ? 500 : 1000);
  }
  CudaCopies copies(1);
  for (size_t at = 0; at < 3000; at += 250) {  // the last two in none
    copies.Add(0, device(), from + at, {to_ + at, 250});
  }
  ASSERT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("copy"), 3 + 2);
  EXPECT_EQ(std::memcmp(to_, memory_.data(), 3000), 0);
}

TEST_F(CudaCopyTest, ArriveWhenTheWorkerHasWaited) {
  std::string first(20, '.'), second(20, '.');
  const std::string data(20, 'x');
  {
    CudaCopies copies(2);
    for (int worker = 0; worker < 2; ++worker) {
      std::string& to = worker == 0 ? first : second;
      copies.Add(worker, device(), FakeCuda::OnDevice(memory_.data()),
                 std::as_writable_bytes(std::span(to)));
      const std::byte* failed = nullptr;
      ASSERT_TRUE(copies.Begin(worker, &failed).ok());
    }
    EXPECT_EQ(fake_.LiveStreams(), 2);
    EXPECT_TRUE(copies.Wait(1).ok());
    EXPECT_NE(first, data);  // only its own
    EXPECT_EQ(second, data);
    EXPECT_TRUE(copies.Wait(0).ok());
    EXPECT_EQ(first, data);
    EXPECT_TRUE(copies.Wait(0).ok());
    EXPECT_EQ(fake_.Calls("cuStreamSynchronize"), 2);  // idle: no call
  }
  EXPECT_EQ(fake_.LiveStreams(), 0);
}

TEST_F(CudaCopyTest, WhatHasNotBegunNeverIs) {
  CudaCopies copies(1);
  AddScattered(&copies, 5);
  EXPECT_TRUE(copies.Wait(0).ok());
  EXPECT_TRUE(BeginAndWait(&copies).ok());
  EXPECT_EQ(fake_.Calls("copy"), 0);
  EXPECT_EQ(fake_.Calls("cuStreamCreate"), 0);
}

TEST_F(CudaCopyTest, LeavesTheThreadsContextAsItWas) {
  CudaCopies copies(1);
  AddScattered(&copies, 3);
  fake_.Fail("copy", 2, 700);
  EXPECT_FALSE(Begin(&copies).ok());
  EXPECT_TRUE(copies.Wait(0).ok());
  EXPECT_EQ(fake_.Calls("cuCtxPushCurrent_v2"),
            fake_.Calls("cuCtxPopCurrent_v2"));
}

enum class Batches { kUsed, kMissing, kRefused };

class CudaCopyWaysTest : public CudaCopyTest,
                         public ::testing::WithParamInterface<Batches> {
 protected:
  CudaCopyWaysTest()
      : CudaCopyTest(GetParam() == Batches::kMissing ? FakeCuda::OldPath()
                                                     : FakeCuda::Path()) {
    if (GetParam() == Batches::kRefused) {
      fake_.Fail("cuMemcpyBatchAsync", 1, 801);
    }
  }
};

TEST_P(CudaCopyWaysTest, EveryByteArrivesAndNoOther) {
  ASSERT_TRUE(lease_->PageLock(device(), 0, lease_->size()).ok());
  std::mt19937 random(11);
  for (char& c : memory_) c = static_cast<char>(random());
  const std::byte* from = FakeCuda::OnDevice(memory_.data());
  fake_.Allocate(from, 3 * kMiB + 17);
  fake_.Allocate(from + 3 * kMiB + 17, 5 * kMiB - 17);
  for (int round = 0; round < 20; ++round) {
    std::string expected(8 * kMiB, '.');
    std::memset(to_, '.', expected.size());
    CudaCopies copies(1);
    // From now here, now there on the device, and on through host memory; from
    // one allocation each, as tensors are.
    size_t there = random() % memory_.size(), here = 0;
    while (here < expected.size()) {
      const size_t largest =
          random() % 10 == 0 ? 5 * kMiB : size_t{1} << random() % 16;
      if (random() % 3 == 0) there = random() % memory_.size();
      if (random() % 5 == 0) here += random() % 100;
      if (there >= memory_.size()) there = 0;
      if (here >= expected.size()) break;
      const size_t border =
          there < 3 * kMiB + 17 ? 3 * kMiB + 17 : memory_.size();
      const size_t size = std::min(
          {1 + random() % largest, border - there, expected.size() - here});
      copies.Add(0, device(random() % 5 == 0 ? 1 : 0), from + there,
                 {to_ + here, size});
      expected.replace(here, size, memory_, there, size);
      there += size;
      here += size;
    }
    const Status status = BeginAndWait(&copies);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(std::memcmp(to_, expected.data(), expected.size()), 0) << round;
  }
  EXPECT_EQ(fake_.PendingCopies(), 0);
  EXPECT_EQ(fake_.Calls("cuMemcpyDtoHAsync_v2") == 0,
            GetParam() == Batches::kUsed);
  // Asked once for each of the two devices.
  if (GetParam() != Batches::kUsed) {
    EXPECT_EQ(fake_.Calls("cuMemcpyBatchAsync"),
              GetParam() == Batches::kRefused ? 2 : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Drivers, CudaCopyWaysTest,
                         ::testing::Values(Batches::kUsed, Batches::kMissing,
                                           Batches::kRefused));

}  // namespace
}  // namespace torch_ckpt
