// Fault points: one before every system call that os/ makes, and "piece", where
// a job begins to read what it wants at once of a file.
//
// Compiled in with TORCH_CKPT_FAULTS (developer and test builds), otherwise
// FaultPoint is empty. A test installs a hook, or a process is started with
//   TORCH_CKPT_FAULTS="<op>:<n>:<action>[,...]"
// op is the call ("openat", "pwrite", "fsync", "renameat"), "*" for any, or
// "direct" for a pread or pwrite past the page cache; n counts its calls in
// this process from 1, "*" for each of them; action is an errno name
// ("ENOSPC"), "short" (the call moves half the bytes), "skip" (it is not made,
// and said to be done), "kill" (SIGKILL to the process) or "stop" (SIGSTOP: the
// call is made once somebody sends SIGCONT, so that a test can do something
// else in the middle of it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace torch_ckpt {

struct FaultAction {
  int sys_errno = 0;  // fail the call with this errno
  bool short_count = false;
  bool skip = false;  // say that it was done, and do not do it
  // Of "statx": what direct I/O is said to need, where it is not 0.
  uint32_t alignment = 0;
};

// What a pread, preadv2 or pwrite is to move.
struct FaultTransfer {
  const void* memory = nullptr;
  size_t bytes = 0;
  uint64_t offset = 0;
  bool direct = false;  // past the page cache
};

struct FaultSite {
  const char* op;
  const std::string& path;   // what it is done to
  const std::string& path2;  // rename target; else empty
  const FaultTransfer* transfer = nullptr;
};

#ifdef TORCH_CKPT_FAULTS
FaultAction FaultPoint(const char* op, const std::string& path,
                       const std::string& path2 = {},
                       const FaultTransfer* transfer = nullptr);
// Replaces the hook; null removes it. Called from any thread that does I/O.
void SetFaultHook(std::function<FaultAction(const FaultSite&)> hook);
#else
inline FaultAction FaultPoint(const char*, const std::string&,
                              const std::string& = {},
                              const FaultTransfer* = nullptr) {
  return {};
}
#endif

}  // namespace torch_ckpt
