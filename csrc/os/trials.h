// What the file system of a directory can do, found by trying it. For reports.
//
// Each trial makes files in `directory`, which is the caller's own
// (os/trial_directory.h), and leaves none. An error is one of a call that a
// save makes too. All may be called from any thread, one at a time for a
// directory.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "os/directory.h"
#include "os/lock.h"

namespace torch_ckpt {

struct Space {
  uint64_t total = 0;
  uint64_t available = 0;  // to this user
};

// Bytes of the file system that `directory` is on.
Result<Space> SpaceOf(const Directory& directory);

struct DirectIoTrial {
  bool works = false;
  // What offsets and lengths, and addresses, must be multiples of.
  uint32_t offset_unit = 0, memory_unit = 0;
};

// Writes one unit past the page cache.
Result<DirectIoTrial> TryDirectIo(const Directory& directory);

// Whether blocks can be reserved, so that a full disk is known at once.
Result<bool> TryAllocate(const Directory& directory);

// Whether a rename can refuse to replace what is there (RENAME_NOREPLACE).
Result<bool> TryNoReplace(const Directory& directory);

struct LockTrial {
  // Whether a second open of the directory is refused the lock.
  bool excludes = false;
  // Whether nothing but a file says who holds it: nobody drops it with a node
  // that died.
  bool by_file = false;
};

// Of the lock of a save (os/lock.h), which the caller holds.
Result<LockTrial> TryLock(const DirectoryLock& held);

// Seconds that a write of 4 KiB and its fsync take: the median of some.
Result<double> TimeSync(const Directory& directory);

}  // namespace torch_ckpt
