#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "fake_cuda.h"
#include "runtime/arena.h"
#include "runtime/cuda_copy.h"
#include "runtime/cuda_driver.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class CudaDriverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto loaded = CudaDriver::Load(FakeCuda::Path());
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    driver_ = std::move(loaded).value();
    auto opened = CudaDevice::Open(driver_.get(), 1);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    device_ = std::move(opened).value();
  }

  FakeCuda fake_;
  std::unique_ptr<const CudaDriver> driver_;
  std::unique_ptr<CudaDevice> device_;
};

ArenaLease LeaseOf(Arena* arena, size_t bytes) {
  auto lease = arena->Lease(bytes);
  EXPECT_TRUE(lease.ok()) << lease.status().ToString();
  return std::move(lease).value();
}

TEST(CudaDriver, IsUnsupportedWithTheReasonWhereThereIsNone) {
  const Status status = CudaDriver::Load("libno_such_cuda.so.1").status();
  EXPECT_EQ(status.kind(), ErrorKind::kUnsupported);
  EXPECT_NE(status.message().find("NVIDIA's driver"), std::string::npos);
  EXPECT_NE(status.message().find("libno_such_cuda.so.1"), std::string::npos);
}

TEST(CudaDriver, NamesTheEntryPointThatALibraryLacks) {
  const Status status = CudaDriver::Load("libm.so.6").status();
  EXPECT_EQ(status.kind(), ErrorKind::kUnsupported);
  EXPECT_NE(status.message().find("has no cuInit"), std::string::npos)
      << status.message();
}

TEST(CudaDriver, IsUnsupportedWhereThereIsNoDevice) {
  FakeCuda fake;
  fake.Fail("cuInit", 1, 100);
  const Status status = CudaDriver::Load(FakeCuda::Path()).status();
  EXPECT_EQ(status.kind(), ErrorKind::kUnsupported);
  EXPECT_NE(status.message().find("cuInit: an error of the fake driver"),
            std::string::npos)
      << status.message();
}

TEST_F(CudaDriverTest, ErrorsHaveTheDriversWords) {
  EXPECT_TRUE(driver_->Check(0, "cuX", 3).ok());
  const Status access = driver_->Check(700, "cuX", 3);
  EXPECT_EQ(access.kind(), ErrorKind::kIo);
  EXPECT_EQ(access.sys_errno(), EIO);
  EXPECT_NE(access.message().find("cuX on device 3: an illegal memory access"),
            std::string::npos)
      << access.message();
  EXPECT_EQ(driver_->Check(2, "cuX", 0).kind(), ErrorKind::kExhausted);
  EXPECT_NE(driver_->Check(10001, "cuX", 0).message().find("unknown error"),
            std::string::npos);
}

TEST_F(CudaDriverTest, AnUnknownDeviceIsAnError) {
  EXPECT_FALSE(CudaDevice::Open(driver_.get(), 7).ok());
}

TEST_F(CudaDriverTest, ArenaMemoryIsLockedOnceAndUntilItIsUnmapped) {
  // Of the process's arena, by a test before this one.
  const int others = fake_.LockedRanges();
  {
    Arena arena(16 * kMiB);
    {
      const ArenaLease lease = LeaseOf(&arena, 8 * kMiB);
      ASSERT_TRUE(lease.PageLock(device_.get(), 0, lease.size()).ok());
      ASSERT_TRUE(lease.PageLock(device_.get(), 0, lease.size()).ok());
    }
    EXPECT_EQ(fake_.LockedRanges() - others, 4);
    EXPECT_EQ(arena.Stats().page_locked, 8 * kMiB);
    {
      const ArenaLease part = LeaseOf(&arena, 4 * kMiB);
      ASSERT_TRUE(part.PageLock(device_.get(), 0, part.size()).ok());
      EXPECT_EQ(fake_.Calls("cuMemHostRegister_v2"), 4);
      arena.Trim();  // what is leased stays
      EXPECT_EQ(fake_.LockedRanges() - others, 2);
    }
    EXPECT_EQ(arena.Stats().page_locked, 4 * kMiB);
  }
  EXPECT_EQ(fake_.LockedRanges(), others);
}

TEST_F(CudaDriverTest, MemoryThatCannotBeLockedIsUsableAllTheSame) {
  Arena arena(16 * kMiB);
  fake_.Fail("cuMemHostRegister_v2", 2, 2);
  const ArenaLease lease = LeaseOf(&arena, 6 * kMiB);
  EXPECT_EQ(lease.PageLock(device_.get(), 0, lease.size()).kind(),
            ErrorKind::kExhausted);
  EXPECT_EQ(arena.Stats().page_locked, 2 * kMiB);
  std::string data(6 * kMiB, 'x');
  CudaCopies copies(1);
  copies.Add(0, device_.get(), FakeCuda::OnDevice(&data[0]), lease.span());
  const std::byte* failed = nullptr;
  ASSERT_TRUE(copies.Begin(0, &failed).ok());
  ASSERT_TRUE(copies.Wait(0).ok());
  EXPECT_EQ(std::memcmp(lease.data(), data.data(), data.size()), 0);
}

}  // namespace
}  // namespace torch_ckpt
