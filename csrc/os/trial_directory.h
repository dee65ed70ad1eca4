// A hidden directory for trials (os/trials.h), which the next trials remove
// where a kill has left it.
//
//  1. Those of dead processes go: the ones whose lock is free.
//  2. A new one is made and locked. Who looks for dead ones in the moment
//     between may take it for one and remove it: then another is made.
//  3. Remove() takes it away, the lock last.
#pragma once

#include <string>

#include "base/status.h"
#include "os/directory.h"
#include "os/lock.h"

namespace torch_ckpt {

// Movable, not copyable. One thread at a time.
class TrialDirectory {
 public:
  // In `parent`, which must outlive it. What is of others, or cannot be
  // removed, stays and is no error.
  static Result<TrialDirectory> Make(const Directory& parent);

  const Directory& directory() const { return directory_; }
  // Why it could not be locked; without a lock it is as good for trials.
  const Result<DirectoryLock>& lock() const { return lock_; }
  Status Remove();

 private:
  TrialDirectory(const Directory& parent, std::string name, Directory directory,
                 Result<DirectoryLock> lock)
      : parent_(&parent),
        name_(std::move(name)),
        directory_(std::move(directory)),
        lock_(std::move(lock)) {}

  const Directory* parent_;
  std::string name_;
  Directory directory_;
  Result<DirectoryLock> lock_;
};

}  // namespace torch_ckpt
