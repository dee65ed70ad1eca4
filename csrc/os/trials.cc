#include "os/trials.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "os/call.h"
#include "os/memory.h"
#include "os/probe.h"
#include "os/transfer_file.h"

namespace torch_ckpt {
namespace {

constexpr const char *kTrialName = "trial", *kOther = "trial.other";

// What fn(File) returns, with a new file of which nothing is left.
template <class Fn>
auto WithFile(const Directory& directory, Fn fn)
    -> decltype(fn(std::declval<File>())) {
  Result<File> file =
      directory.OpenFile(kTrialName, {.write = true, .create_new = true});
  if (!file.ok()) return file.status();
  auto result = fn(std::move(file).value());
  const Status gone = directory.Unlink(kTrialName, /*missing_ok=*/true);
  if (result.ok() && !gone.ok()) return gone;
  return result;
}

Result<DirectIoTrial> WriteUnit(File file) {
  DirectIoTrial trial;
  TC_ASSIGN_OR_RETURN(const DirectIo asked, ProbeDirectIo(file));
  trial.offset_unit = asked.offset_alignment;
  trial.memory_unit = asked.memory_alignment;
  constexpr size_t kUnit = internal::kMaxDirectUnit;
  TC_ASSIGN_OR_RETURN(std::byte* const memory, MapMemory(kUnit, kUnit));
  const auto write = [&]() -> Result<DirectIoTrial> {
    internal::TransferFile target(std::move(file), /*writable=*/true,
                                  /*direct=*/true);
    const uint64_t unit = target.DirectUnit(memory, /*keep_cached=*/false);
    if (unit != 0) {
      TC_ASSIGN_OR_RETURN(const internal::DirectMoved moved,
                          target.WriteDirect({memory, unit}, 0));
      trial.works = !moved.refused;
    }
    TC_RETURN_IF_ERROR(target.Close());
    return trial;
  };
  const Result<DirectIoTrial> written = write();
  UnmapMemory(memory, kUnit);
  return written;
}

}  // namespace

Result<Space> SpaceOf(const Directory& directory) {
  struct statvfs found{};
  if (internal::SystemCall("fstatvfs", directory.path(), [&] {
        return fstatvfs(directory.fd(), &found);
      }) < 0) {
    return Status::Io(errno, "fstatvfs", directory.path());
  }
  const uint64_t block = found.f_frsize;
  return Space{block * found.f_blocks, block * found.f_bavail};
}

Result<DirectIoTrial> TryDirectIo(const Directory& directory) {
  return WithFile(directory, WriteUnit);
}

Result<bool> TryAllocate(const Directory& directory) {
  return WithFile(directory, [](const File& file) -> Result<bool> {
    return file.Allocate(uint64_t{1} << 20);
  });
}

Result<bool> TryNoReplace(const Directory& directory) {
  const auto rename = [&](const File&) -> Result<bool> {
    const std::string from = directory.Join(kTrialName);
    if (internal::SystemCall("renameat2", from, directory.Join(kOther), [&] {
          return renameat2(directory.fd(), kTrialName, directory.fd(), kOther,
                           RENAME_NOREPLACE);
        }) == 0) {
      TC_RETURN_IF_ERROR(directory.Unlink(kOther, /*missing_ok=*/true));
      return true;
    }
    if (internal::LacksCall(errno)) return false;
    return Status::Io(errno, "renameat2", from);
  };
  return WithFile(directory, rename);
}

Result<LockTrial> TryLock(const DirectoryLock& held) {
  LockTrial trial;
  trial.by_file = held.by_file();
  const Result<DirectoryLock> second =
      DirectoryLock::Acquire(held.directory().path());
  if (!second.ok() && second.status().kind() != ErrorKind::kConflict) {
    return second.status();
  }
  trial.excludes = !second.ok();
  return trial;
}

Result<double> TimeSync(const Directory& directory) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRounds = 9;
  const auto rounds = [](const File& file) -> Result<double> {
    constexpr std::array<std::byte, 4096> kBlock = {};
    std::vector<double> seconds;
    for (uint64_t i = 0; i < kRounds; ++i) {
      const Clock::time_point begin = Clock::now();
      TC_RETURN_IF_ERROR(file.WriteAll(kBlock, i * kBlock.size()));
      TC_RETURN_IF_ERROR(file.Sync());
      seconds.push_back(
          std::chrono::duration<double>(Clock::now() - begin).count());
    }
    std::ranges::nth_element(seconds, seconds.begin() + kRounds / 2);
    return seconds[kRounds / 2];
  };
  return WithFile(directory, rounds);
}

}  // namespace torch_ckpt
