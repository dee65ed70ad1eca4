// The exclusive lock of a save on its staging directory: three locks in one.
//
//  1. flock(2) on the directory. NFS takes it without asking the server, so
//     that it may hold off the processes of one node only.
//  2. An open-file-description lock (fcntl) on the regular file ".lock" in it,
//     which the servers of NFS, Lustre and their like arbitrate, and drop with
//     a client that died. The file says who holds it.
//  3. Where the file system refuses both, the file itself, made with O_EXCL. A
//     holder that is provably dead (os/lock_holder.h) is replaced; any other
//     one is kConflict and named in the error.
//
// Whoever would replace a dead holder X first makes ".lock.after-<X>", a lock
// of the third kind that gives the right to it, and then looks at ".lock"
// again. Only X itself and the holder of that right remove X's file, so that
// nobody can remove a lock that somebody faster has made since.
//
// The lock goes with Release(), the destructor or the death of the process. A
// child that was forked has no part in it: its copies of the descriptors are
// replaced at the fork, so that the lock of a parent that is killed does not
// live on in it. (Not so a child of a bare clone(2), which no handler hears
// of.)
#pragma once

#include <string>

#include "base/status.h"
#include "os/directory.h"

namespace torch_ckpt {

// No file of a checkpoint begins with a dot.
inline constexpr const char* kLockFileName = ".lock";

// Movable, not copyable. One thread at a time.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock(DirectoryLock&&) noexcept;
  DirectoryLock& operator=(DirectoryLock&&) noexcept;
  ~DirectoryLock();

  // Never waits: kConflict when another open of the directory holds the lock,
  // in this process or any other; ESTALE when `path` or the lock's file was
  // removed or replaced meanwhile: the holder has just finished, or did on
  // another node, and this one remembers its file. `path` must exist.
  static Result<DirectoryLock> Acquire(const std::string& path);
  // Whether somebody holds the lock of the directory `path`. Takes nothing, so
  // that nobody who wants the lock meets this; what it says may be over by now.
  // Doubt means held.
  static Result<bool> IsHeld(const std::string& path);
  bool held() const { return held_; }
  bool by_file() const { return by_file_; }
  const Directory& directory() const { return directory_; }
  void Release();
  // Removes the directory, which must be empty but for the lock's own file,
  // and releases the lock. Ok when it stands elsewhere by now, or when
  // somebody has begun to use it.
  Status Remove();

 private:
  Status Lock();
  // By the third kind of lock; the file is there already.
  Status TakeOver();
  Status CheckStillThere() const;
  void RemoveFile();
  void CloseFile();  // and lets go of its lock
  // Closes the descriptors; what the kernel held with them goes.
  void Forget();

  Directory directory_;
  File file_;
  bool held_ = false, by_file_ = false;
  int owner_ = 0;  // the process that took it
};

}  // namespace torch_ckpt
