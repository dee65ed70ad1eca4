// How os/ makes a system call: the fault point first, EINTR again.
// For the files of os/ only.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>

#include "os/fault.h"
#include "os/file.h"

namespace torch_ckpt::internal {

// fn() makes the call and returns its result, below 0 with errno on failure.
// Not for close(2): Linux has freed the descriptor when that says EINTR.
template <class Fn>
auto SystemCall(const char* op, const std::string& path,
                const std::string& path2, Fn fn) -> decltype(fn()) {
  for (;;) {
    decltype(fn()) result = -1;
    const FaultAction fault = FaultPoint(op, path, path2);
    if (fault.sys_errno != 0) {
      errno = fault.sys_errno;
    } else {
      result = fault.skip ? 0 : fn();
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

template <class Fn>
auto SystemCall(const char* op, const std::string& path, Fn fn)
    -> decltype(fn()) {
  return SystemCall(op, path, {}, fn);
}

// Whether the kernel, the file system or the program behind it lacks the call,
// or a flag of it.
inline bool LacksCall(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP;
}

// Whether the kernel does not know the call at all, or a sandbox that does not
// know it refuses it.
inline bool UnknownCall(int error) { return error == ENOSYS || error == EPERM; }

// What is moved by one call at most. Linux moves 2 GiB less a page; a round
// number below keeps what is left of a direct transfer aligned.
inline constexpr size_t kMaxTransfer = size_t{1} << 30;

// What a transfer of `bytes` becomes under a "short" fault: about half, kept
// on a page boundary so that direct I/O can go on from there.
inline size_t ShortCount(size_t bytes) {
  constexpr size_t kPage = 4096;
  if (bytes > 2 * kPage) return bytes / 2 / kPage * kPage;
  return std::max<size_t>(bytes / 2, bytes == 0 ? 0 : 1);
}

// The same for a call that moves bytes: fn(count) with count <= what.bytes.
template <class Fn>
auto TransferCall(const char* op, const std::string& path,
                  const FaultTransfer& what, Fn fn) -> decltype(fn(size_t{})) {
  for (;;) {
    decltype(fn(size_t{})) result = -1;
    const FaultAction fault = FaultPoint(op, path, {}, &what);
    if (fault.sys_errno != 0) {
      errno = fault.sys_errno;
    } else {
      result = fn(fault.short_count ? ShortCount(what.bytes) : what.bytes);
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

inline FileInfo ToFileInfo(const struct stat& st) {
  FileInfo info;
  info.bytes = static_cast<uint64_t>(st.st_size);
  info.device = st.st_dev;
  info.inode = st.st_ino;
  info.modified_ns =
      int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + int64_t{st.st_mtim.tv_nsec};
  info.is_directory = S_ISDIR(st.st_mode);
  info.is_regular = S_ISREG(st.st_mode);
  info.is_link = S_ISLNK(st.st_mode);
  return info;
}

}  // namespace torch_ckpt::internal
