// One sparse file, mapped piece by piece: what is mapped, what is given back,
// who else may map it, and what a system that refuses is answered.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "os/fault.h"
#include "os/memory.h"
#include "os/shared_memory.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kUnit = 2 * kMiB;

std::unique_ptr<SharedMemory> Made() {
  auto made = SharedMemory::Create(kUnit);
  EXPECT_TRUE(made.ok()) << made.status().ToString();
  return std::move(made).value();
}

std::byte* Mapped(SharedMemory* memory, size_t bytes) {
  auto mapped = memory->Map(bytes);
  EXPECT_TRUE(mapped.ok()) << mapped.status().ToString();
  const Status present = memory->MakePresent(*mapped, bytes);
  EXPECT_TRUE(present.ok()) << present.ToString();
  return *mapped;
}

// What another process would map.
Result<std::byte*> Shown(int fd, uint64_t offset, size_t bytes) {
  TC_ASSIGN_OR_RETURN(const SharedRange range, FindShared(fd, offset, bytes));
  return MapShared(fd, range);
}

// What the file takes of the machine's memory.
uint64_t FileMemory(const SharedMemory& memory) {
  struct stat st{};
  EXPECT_EQ(fstat(memory.fd(), &st), 0);
  return 512 * static_cast<uint64_t>(st.st_blocks);
}

size_t OpenFiles() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(SharedMemory, PiecesAreStretchesOfOneFile) {
  const auto memory = Made();
  std::byte* const a = Mapped(memory.get(), kUnit);
  std::byte* const b = Mapped(memory.get(), 2 * kUnit);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % kUnit, 0u);
  EXPECT_EQ(b, a + kUnit);
  EXPECT_EQ(memory->OffsetOf(a), 0u);
  EXPECT_EQ(memory->OffsetOf(b), kUnit);
  EXPECT_EQ(FileMemory(*memory), 3 * kUnit);  // populated
  std::memset(a, 5, 3 * kUnit);
  std::byte in_file{};
  ASSERT_EQ(pread(memory->fd(), &in_file, 1, kUnit + 7), 1);
  EXPECT_EQ(in_file, std::byte{5});
}

TEST(SharedMemory, HolesGiveMemoryBackAndAreFilledAgain) {
  const auto memory = Made();
  std::byte* const all = Mapped(memory.get(), 6 * kUnit);
  EXPECT_TRUE(memory->Unmap(all + kUnit, kUnit));
  EXPECT_TRUE(memory->Unmap(all + 4 * kUnit, kUnit));
  EXPECT_EQ(FileMemory(*memory), 4 * kUnit);
  // Too large for a hole of one, until two holes are one.
  EXPECT_EQ(Mapped(memory.get(), 2 * kUnit), all + 6 * kUnit);
  EXPECT_TRUE(memory->Unmap(all + 3 * kUnit, kUnit));
  EXPECT_EQ(Mapped(memory.get(), 2 * kUnit), all + 3 * kUnit);
  EXPECT_EQ(Mapped(memory.get(), kUnit), all + kUnit);
  std::memset(all, 1, 8 * kUnit);
  EXPECT_TRUE(memory->Unmap(all, 8 * kUnit));
  EXPECT_EQ(FileMemory(*memory), 0u);
  EXPECT_EQ(Mapped(memory.get(), kUnit), all);
}

TEST(SharedMemory, MoreThanThereAreAddressesIsRefused) {
  const auto memory = Made();
  const size_t bytes = size_t{1} << 60;
  EXPECT_EQ(memory->Map(bytes).status().kind(), ErrorKind::kExhausted);
  Mapped(memory.get(), kUnit);
}

TEST(SharedMemory, OthersMapTheSameMemory) {
  const auto memory = Made();
  std::byte* const data = Mapped(memory.get(), 2 * kUnit) + kUnit;
  auto other = Shown(memory->fd(), memory->OffsetOf(data), kUnit);
  ASSERT_TRUE(other.ok()) << other.status().ToString();
  ASSERT_NE(*other, data);
  data[3] = std::byte{7};
  EXPECT_EQ((*other)[3], std::byte{7});
  (*other)[4] = std::byte{8};
  EXPECT_EQ(data[4], std::byte{8});
  // A hole under somebody's feet reads as zeros.
  EXPECT_TRUE(memory->Unmap(data, kUnit));
  EXPECT_EQ((*other)[3], std::byte{0});
  UnmapMemory(*other, kUnit);
}

TEST(SharedMemory, OnlyPiecesOfSuchAFileAreMapped) {
  const auto memory = Made();
  struct stat st{};
  ASSERT_EQ(fstat(memory->fd(), &st), 0);
  const auto end = static_cast<uint64_t>(st.st_size);
  const auto kind = [](int fd, uint64_t offset, size_t bytes) {
    return Shown(fd, offset, bytes).status().kind();
  };
  EXPECT_EQ(kind(memory->fd(), end, kUnit), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(memory->fd(), end - kUnit, 2 * kUnit),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(memory->fd(), UINT64_MAX, 2), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(memory->fd(), 0, SIZE_MAX), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(memory->fd(), 1, kUnit), ErrorKind::kIo);  // no page begins
  EXPECT_EQ(kind(-1, 0, kUnit), ErrorKind::kInvalidArgument);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_EQ(kind(pipes[0], 0, kUnit), ErrorKind::kInvalidArgument);
  close(pipes[0]);
  close(pipes[1]);
  // Large enough, but it could shrink, and then its reader would be killed.
  const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(loose, kUnit), 0);
  EXPECT_EQ(kind(loose, 0, kUnit), ErrorKind::kInvalidArgument);
  ASSERT_EQ(fcntl(loose, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  auto mapped = Shown(loose, 0, kUnit);
  ASSERT_TRUE(mapped.ok());
  UnmapMemory(*mapped, kUnit);
  close(loose);
  EXPECT_NE(ftruncate(memory->fd(), 0), 0) << "ours can shrink";
}

TEST(SharedMemory, NothingStaysOpenOrMapped) {
  const size_t before = OpenFiles();
  for (int i = 0; i < 3; ++i) {
    const auto memory = Made();
    Mapped(memory.get(), kUnit)[0] = std::byte{1};
    EXPECT_EQ(OpenFiles(), before + 1);
  }
  EXPECT_EQ(OpenFiles(), before);
}

#ifdef TORCH_CKPT_FAULTS
TEST(SharedMemory, SaysWhatTheSystemRefuses) {
  const size_t before = OpenFiles();
  for (const std::string op :
       {"memfd_create", "ftruncate", "fcntl", "fallocate", "mmap"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EPERM : 0};
    });
    const Status status = SharedMemory::Create(kUnit).status();
    SetFaultHook(nullptr);
    EXPECT_EQ(status.kind(), ErrorKind::kUnsupported) << op;
    EXPECT_NE(status.message().find(op + " failed"), std::string::npos)
        << status.message();
    EXPECT_EQ(OpenFiles(), before);
  }
}

TEST(SharedMemory, WhatIsNotMappedTakesNothing) {
  const auto memory = Made();
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "mmap" ? ENOMEM : 0};
  });
  const Status status = memory->Map(4 * kUnit).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_EQ(FileMemory(*memory), 0u);
  std::byte* const data = Mapped(memory.get(), 4 * kUnit);
  EXPECT_EQ(memory->OffsetOf(data), 0u);
  data[0] = std::byte{1};
  EXPECT_TRUE(memory->Unmap(data, 4 * kUnit));
}

TEST(SharedMemory, MemoryThatIsNotThereIsAnError) {
  const auto memory = Made();
  auto mapped = memory->Map(kUnit);
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(FileMemory(*memory), 0u);
  int refusal = ENOMEM;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "madvise" ? refusal : 0};
  });
  EXPECT_EQ(memory->MakePresent(*mapped, kUnit).kind(), ErrorKind::kExhausted);
  EXPECT_EQ(FileMemory(*memory), 0u);
  // A kernel that does not populate reserves.
  refusal = EINVAL;
  EXPECT_TRUE(memory->MakePresent(*mapped, kUnit).ok());
  EXPECT_EQ(FileMemory(*memory), kUnit);
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "madvise" ? EINVAL : ENOSPC};
  });
  EXPECT_EQ(memory->MakePresent(*mapped, kUnit).kind(), ErrorKind::kExhausted);
  SetFaultHook(nullptr);
  (*mapped)[kUnit - 1] = std::byte{1};
}

TEST(SharedMemory, WhatCannotBeGivenBackIsStillThere) {
  const auto memory = Made();
  std::byte* const data = Mapped(memory.get(), kUnit);
  data[0] = std::byte{1};
  SetFaultHook([](const FaultSite&) -> FaultAction { return {ENOMEM}; });
  EXPECT_FALSE(memory->Unmap(data, kUnit));
  SetFaultHook(nullptr);
  EXPECT_EQ(FileMemory(*memory), kUnit);
  EXPECT_EQ(data[0], std::byte{1});
  EXPECT_NE(Mapped(memory.get(), kUnit), data);
  EXPECT_TRUE(memory->Unmap(data, kUnit));
  EXPECT_EQ(FileMemory(*memory), kUnit);
  EXPECT_EQ(Mapped(memory.get(), kUnit), data);
}
#endif

}  // namespace
}  // namespace torch_ckpt
