// The exclusive lock of a save on its staging directory.
//
// flock(2) on the directory; where the file system refuses that, a file
// "lock" made with O_EXCL that holds host, boot id, pid and start time: a
// holder that is provably dead (same host, other boot id or no such process)
// is replaced, any other one is kConflict and named in the error.
// Released by Release(), the destructor or the death of the process; not by
// those of a forked child, which shares the flock but does not own it.
//
// NFS: the kernel takes flock on a directory without asking the server, so it
// holds back the processes of one node only. That is enough for what it is for:
// one coordinator saves into a directory, and two jobs that are pointed at one
// directory from two nodes still meet the renames of the commit.
#pragma once

#include <string>

#include "base/status.h"
#include "os/directory.h"

namespace torch_ckpt {

// The name of the lock file in a directory that has no flock. While the lock is
// held there, List() of the directory shows it and rmdir fails: release first.
inline constexpr const char* kLockFileName = "lock";

// Movable, not copyable. One thread at a time.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock(DirectoryLock&&) noexcept;
  DirectoryLock& operator=(DirectoryLock&&) noexcept;
  ~DirectoryLock();

  // Never waits: kConflict when another open of the directory holds the lock,
  // in this process or any other, or when `path` was removed or replaced
  // meanwhile (the holder has just finished). `path` must exist.
  static Result<DirectoryLock> Acquire(const std::string& path);
  bool held() const { return directory_.valid(); }
  bool by_file() const { return by_file_; }
  const Directory& directory() const { return directory_; }
  void Release();

 private:
  Directory directory_;
  bool by_file_ = false;
  int owner_ = 0;  // the process that took it
};

}  // namespace torch_ckpt
