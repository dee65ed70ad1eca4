#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "os/directory.h"
#include "os/fault.h"
#include "os/file.h"
#include "os/probe.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

class FileTest : public TemporaryDirectory {
 protected:
  File Create(const std::string& name = "f") {
    auto file = dir().OpenFile(name, {.write = true, .create_new = true});
    EXPECT_TRUE(file.ok()) << file.status().ToString();
    return std::move(file).value();
  }
};

std::string Read(const File& file, size_t bytes, uint64_t offset) {
  std::string text(bytes, '\0');
  const Status status = file.ReadExact(
      {reinterpret_cast<std::byte*>(text.data()), bytes}, offset);
  return status.ok() ? text : status.ToString();
}

TEST_F(FileTest, WritesAndReadsBack) {
  File file = Create();
  ASSERT_TRUE(file.WriteAll(AsBytes("hello world"), 3).ok());
  EXPECT_EQ(Read(file, 5, 3), "hello");
  EXPECT_EQ(Read(file, 3, 0), std::string(3, '\0'));
  auto info = file.Stat();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->bytes, 14u);
  EXPECT_TRUE(info->is_regular);
  EXPECT_FALSE(info->is_directory);
  EXPECT_NE(info->inode, 0u);
  ASSERT_TRUE(file.Truncate(4).ok());
  EXPECT_EQ(file.Stat()->bytes, 4u);
  EXPECT_TRUE(file.Sync().ok());
  EXPECT_TRUE(file.Close().ok());
  EXPECT_FALSE(file.valid());
  EXPECT_TRUE(file.Close().ok()) << "a second close does nothing";
}

TEST_F(FileTest, EarlyEndIsCorruptAndSaysWhere) {
  const File file = Create();
  ASSERT_TRUE(file.WriteAll(AsBytes("12345"), 0).ok());
  std::string out(10, '\0');
  const Status status =
      file.ReadExact({reinterpret_cast<std::byte*>(out.data()), out.size()}, 2);
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_NE(status.message().find("file ends at byte 5"), std::string::npos);
  EXPECT_EQ(status.file(), file.path());
}

TEST_F(FileTest, AllocateMakesRoomOrSaysNo) {
  const File file = Create();
  auto done = file.Allocate(1 << 20);
  ASSERT_TRUE(done.ok()) << done.status().ToString();
  if (*done) {
    EXPECT_EQ(file.Stat()->bytes, 1u << 20);
  }
  EXPECT_TRUE(*file.Allocate(0));
}

TEST_F(FileTest, ReadCachedNeverGivesWrongBytes) {
  const File file = Create();
  ASSERT_TRUE(file.WriteAll(AsBytes("abcdef"), 0).ok());
  std::string out(10, '?');
  auto got = file.ReadCached(
      {reinterpret_cast<std::byte*>(out.data()), out.size()}, 1);
  ASSERT_TRUE(got.ok()) << got.status().ToString();
  ASSERT_LE(*got, 5u);
  EXPECT_EQ(out.substr(0, *got), std::string("bcdef").substr(0, *got));
}

TEST_F(FileTest, IsCachedSaysWhatIsThere) {
  const File file = Create();
  const std::string text(20000, 'x');
  ASSERT_TRUE(file.WriteAll(AsBytes(text), 0).ok());
  const auto written = file.IsCached(0, text.size());
  if (!written) GTEST_SKIP() << "the kernel has no cachestat";
  if (!*written) GTEST_SKIP() << "the pages are another file's (overlayfs)";
  EXPECT_EQ(file.IsCached(4095, 2), true);
  EXPECT_EQ(file.IsCached(0, 0), true);
  EXPECT_EQ(file.IsCached(0, 1 << 20), false) << "beyond the end";
  EXPECT_EQ(file.IsCached(1 << 20, 1), false);
  DropCache(file.path());
  const auto dropped = file.IsCached(0, text.size());
  ASSERT_TRUE(dropped);
  if (*dropped) GTEST_SKIP() << "the file system keeps its pages";
  std::string out(text.size(), '?');
  ASSERT_TRUE(
      file.ReadExact({reinterpret_cast<std::byte*>(out.data()), out.size()}, 0)
          .ok());
  EXPECT_EQ(file.IsCached(0, text.size()), true);
  DropCache(file.path());
  file.ReadAhead(0, text.size());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (file.IsCached(0, text.size()) == false &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(file.IsCached(0, text.size()), true);
}

TEST_F(FileTest, ReadAheadOfWhatIsNotThereDoesNothing) {
  const File file = Create();
  file.ReadAhead(0, 1 << 20);
  file.ReadAhead(UINT64_MAX, UINT64_MAX);
  EXPECT_EQ(file.Stat()->bytes, 0u);
}

TEST_F(FileTest, MovesItsDescriptor) {
  File first = Create();
  const int fd = first.fd();
  File second = std::move(first);
  EXPECT_EQ(second.fd(), fd);
  second = File();
  EXPECT_EQ(fcntl(fd, F_GETFD), -1) << "the descriptor must be closed";
}

TEST_F(FileTest, OffsetsBeyondAnyFileAreRefused) {
  const File file = Create();
  EXPECT_EQ(file.WriteAll(AsBytes("x"), UINT64_MAX).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(file.Truncate(uint64_t{1} << 63).kind(),
            ErrorKind::kInvalidArgument);
}

TEST_F(FileTest, WriteToReadOnlyNamesOperationAndPath) {
  Create().Close().ok();
  auto file = dir().OpenFile("f", {});
  ASSERT_TRUE(file.ok());
  const Status status = file->WriteAll(AsBytes("x"), 7);
  EXPECT_EQ(status.kind(), ErrorKind::kIo);
  EXPECT_EQ(status.sys_errno(), EBADF);
  EXPECT_NE(status.message().find("pwrite of 1 bytes at byte 7"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(status.file(), path() + "/f");
}

TEST_F(FileTest, ProbesTheFileSystem) {
  const File file = Create();
  auto direct = ProbeDirectIo(file);
  ASSERT_TRUE(direct.ok()) << direct.status().ToString();
  EXPECT_EQ(4096 % direct->memory_alignment, 0u);
  EXPECT_GT(direct->offset_alignment, 0u);
  const auto directory = Directory::Open(path());
  ASSERT_TRUE(directory.ok());
  auto name = FileSystemName(*directory);
  ASSERT_TRUE(name.ok());
  EXPECT_FALSE(name->empty());
}

#ifdef TORCH_CKPT_FAULTS

TEST_F(FileTest, ShortCountsAndInterruptsAreContinued) {
  const File file = Create();
  std::string text(100000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  int calls = 0;
  SetFaultHook([&](const FaultSite&) -> FaultAction {
    ++calls;
    if (calls % 3 == 0) return {.sys_errno = EINTR};
    return {.short_count = true};
  });
  const Status written = file.WriteAll(AsBytes(text), 0);
  const std::string back = Read(file, text.size(), 0);
  SetFaultHook(nullptr);
  ASSERT_TRUE(written.ok()) << written.ToString();
  EXPECT_EQ(back, text);
  EXPECT_GT(calls, 20);
}

TEST_F(FileTest, EachFailureComesOutWithItsErrno) {
  File file = Create();
  ASSERT_TRUE(file.WriteAll(AsBytes("abc"), 0).ok());
  std::string out(3, '\0');
  const MutableByteSpan span(reinterpret_cast<std::byte*>(out.data()), 3);
  const auto with = [&](const std::string& op, int error, auto fn) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno =
                  site.op == op && site.path == file.path() ? error : 0};
    });
    const Status status = fn();
    SetFaultHook(nullptr);
    EXPECT_EQ(status.kind(), ErrorKind::kIo) << op;
    EXPECT_EQ(status.sys_errno(), error) << op;
    EXPECT_EQ(status.message().rfind(op, 0), 0u) << status.message();
  };
  with("pread", EIO, [&] { return file.ReadExact(span, 0); });
  with("preadv2", EIO, [&] { return file.ReadCached(span, 0).status(); });
  with("pwrite", ENOSPC, [&] { return file.WriteAll(AsBytes("x"), 0); });
  with("fallocate", ENOSPC, [&] { return file.Allocate(10).status(); });
  with("ftruncate", EIO, [&] { return file.Truncate(1); });
  with("fsync", EIO, [&] { return file.Sync(); });
  with("fstat", EIO, [&] { return file.Stat().status(); });
  with("statx", EIO, [&] { return ProbeDirectIo(file).status(); });
  with("close", EIO, [&] { return file.Close(); });
  EXPECT_FALSE(file.valid()) << "closed even when close failed";
}

TEST_F(FileTest, RoomIsMadeInSteps) {
  const File file = Create();
  int calls = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.path == file.path()) ++calls;
    return {};
  });
  auto done = file.Allocate(600 << 20);
  SetFaultHook(nullptr);
  ASSERT_TRUE(done.ok()) << done.status().ToString();
  if (!*done) GTEST_SKIP() << "not on this file system";
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(file.Stat()->bytes, 600u << 20);
}

// As tmpfs of older kernels does while a timer runs: any signal that could come
// ends the call, and it is undone.
TEST_F(FileTest, SignalsDoNotKeepRoomFromBeingMade) {
  const File file = Create();
  int cut_off = 0;
  bool can_come = true;
  SetFaultHook([&](const FaultSite&) -> FaultAction {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    can_come = sigismember(&blocked, SIGALRM) == 0;
    return {.sys_errno = can_come && ++cut_off < 1000 ? EINTR : 0};
  });
  EXPECT_TRUE(file.Allocate(1 << 20).ok());
  EXPECT_EQ(cut_off, 0);
  // Nor does what cannot be blocked, for ever.
  int calls = 0;
  SetFaultHook([&](const FaultSite&) -> FaultAction {
    return {.sys_errno = ++calls < 1000 ? EINTR : 0};
  });
  const auto room = file.Allocate(1 << 20);
  SetFaultHook(nullptr);
  ASSERT_TRUE(room.ok()) << room.status().ToString();
  EXPECT_FALSE(*room);
  EXPECT_LT(calls, 1000);
  sigset_t after;
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  EXPECT_EQ(sigismember(&after, SIGALRM), 0);
}

TEST_F(FileTest, UnsupportedCallsAreNoErrors) {
  const File file = Create();
  ASSERT_TRUE(file.WriteAll(AsBytes("abc"), 0).ok());
  std::byte out[3];
  for (int error : {EOPNOTSUPP, ENOSYS}) {
    SetFaultHook(
        [&](const FaultSite&) -> FaultAction { return {.sys_errno = error}; });
    const auto allocated = file.Allocate(10);
    const auto cached = file.ReadCached(out, 0);
    const auto there = file.IsCached(0, 3);
    SetFaultHook(nullptr);
    EXPECT_FALSE(there.has_value());
    ASSERT_TRUE(allocated.ok());
    EXPECT_FALSE(*allocated);
    ASSERT_TRUE(cached.ok());
    EXPECT_EQ(*cached, 0u);
  }
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    const bool asks = std::strcmp(site.op, "statx") == 0;
    return {.sys_errno = asks ? ENOSYS : EINVAL};
  });
  const auto direct = ProbeDirectIo(file);
  SetFaultHook(nullptr);
  ASSERT_TRUE(direct.ok());
  EXPECT_TRUE(direct->supported) << "a transfer will tell";
  EXPECT_GE(direct->offset_alignment, 4096u);
  EXPECT_EQ(direct->memory_alignment, direct->offset_alignment);
}

TEST_F(FileTest, AFailedSyncIsNotMadeAgain) {
  const File file = Create();
  int calls = 0;
  SetFaultHook([&](const FaultSite&) -> FaultAction {
    ++calls;
    return {.sys_errno = EIO};
  });
  const Status status = file.Sync();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.sys_errno(), EIO);
  EXPECT_EQ(calls, 1);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
