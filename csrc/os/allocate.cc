#include "os/allocate.h"

#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "os/fault.h"

namespace torch_ckpt::internal {
namespace {

// Well below a second, for which the thread's signals wait.
constexpr uint64_t kStep = uint64_t{256} << 20;
// Of one step: what cannot be blocked (SIGSTOP) is rare.
constexpr int kTries = 100;

// Blocks all signals of this thread but those of its own mistakes.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
      sigdelset(&all, own);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

int AllocateStep(int fd, int mode, uint64_t offset, uint64_t bytes,
                 const std::string& path) {
  const NoSignals no_signals;
  for (int tries = 1;; ++tries) {
    int result = -1;
    const FaultAction fault = FaultPoint("fallocate", path);
    if (fault.sys_errno != 0) {
      errno = fault.sys_errno;
    } else {
      result = fallocate(fd, mode, static_cast<off_t>(offset),
                         static_cast<off_t>(bytes));
    }
    if (result >= 0 || errno != EINTR || tries == kTries) return result;
  }
}

}  // namespace

int Allocate(int fd, int mode, uint64_t offset, uint64_t bytes,
             const std::string& path) {
  for (uint64_t at = 0; at < bytes; at += kStep) {
    const int result =
        AllocateStep(fd, mode, offset + at, std::min(kStep, bytes - at), path);
    if (result < 0) return result;
  }
  return 0;
}

}  // namespace torch_ckpt::internal
