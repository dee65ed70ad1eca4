#include "os/fork.h"

#include <pthread.h>

#include <atomic>

namespace torch_ckpt {
namespace {

std::atomic<bool> in_forked_child{false};

// Registered while the library is loaded, before anything can have forked from
// a process that used it. It fails only for want of memory at that time; then
// no fork is ever seen.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

}  // namespace

bool InForkedChild() { return in_forked_child.load(std::memory_order_relaxed); }

Status NotInForkedChild() {
  if (!InForkedChild()) return {};
  return Unsupported(
      "torch_ckpt was loaded before this process was forked, and its threads "
      "and buffers stayed with the parent; start workers with the 'spawn' or "
      "'forkserver' method to use it in them");
}

}  // namespace torch_ckpt
