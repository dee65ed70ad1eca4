#include "os/fork.h"

#include <pthread.h>

#include <atomic>

namespace torch_ckpt {
namespace {

std::atomic<bool> in_forked_child{false};

std::atomic<bool> registered{false};

}  // namespace

bool InForkedChild() { return in_forked_child.load(std::memory_order_relaxed); }

Status NotInForkedChild() {
  // Not by a static object: a child that is forked while another thread makes
  // it would wait for that thread. It fails only for want of memory; then no
  // fork is ever seen.
  if (!registered.exchange(true)) {
    (void)pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  }
  if (!InForkedChild()) return {};
  return Unsupported(
      "torch_ckpt was used before this process was forked, and its threads "
      "and buffers stayed with the parent; start workers with the 'spawn' or "
      "'forkserver' method to use it in them");
}

}  // namespace torch_ckpt
