#include "os/wait_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace torch_ckpt {

bool WaitWord(const std::atomic<uint32_t>* word, uint32_t value, int wait_ms) {
  const timespec time{wait_ms / 1000, wait_ms % 1000 * 1'000'000L};
  // Not the private kind: other processes wake us.
  const long answer =
      syscall(SYS_futex, word, FUTEX_WAIT, value, &time, nullptr, 0);
  if (answer == 0 || errno == EAGAIN) return true;
  if (errno != ETIMEDOUT && errno != EINTR) {  // a system that forbids it
    const timespec moment{0, 1'000'000L};
    (void)nanosleep(&moment, nullptr);
  }
  return false;
}

void WakeWord(const std::atomic<uint32_t>* word) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace torch_ckpt
