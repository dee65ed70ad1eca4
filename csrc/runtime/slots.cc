#include "runtime/slots.h"

#include "os/wait_word.h"

namespace torch_ckpt {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free);

// How often a slot has been used when `item` is in it; wraps around.
uint32_t Round(uint64_t item) {
  return static_cast<uint32_t>(item / SlotQueue::kSlots);
}

Status WaitUntil(std::atomic<uint32_t>* word, uint32_t wanted,
                 const StillWanted& still_wanted) {
  constexpr int kLookMs = 50;
  for (;;) {
    const uint32_t now = word->load(std::memory_order_acquire);
    if (now == wanted) return {};
    if (WaitWord(word, now, kLookMs)) continue;
    Status status = still_wanted();
    // Who fills the last item and ends is not gone without it.
    if (word->load(std::memory_order_acquire) == wanted) return {};
    TC_RETURN_IF_ERROR(std::move(status));
  }
}

void Set(std::atomic<uint32_t>* word, uint32_t value) {
  word->store(value, std::memory_order_release);
  WakeWord(word);
}

}  // namespace

Status SlotQueue::WaitFree(uint64_t item,
                           const StillWanted& still_wanted) const {
  return WaitUntil(Freed(item), Round(item), still_wanted);
}

Status SlotQueue::WaitFilled(uint64_t item,
                             const StillWanted& still_wanted) const {
  return WaitUntil(Filled(item), Round(item) + 1, still_wanted);
}

void SlotQueue::Fill(uint64_t item) const {
  Set(Filled(item), Round(item) + 1);
}

void SlotQueue::Free(uint64_t item) const { Set(Freed(item), Round(item) + 1); }

}  // namespace torch_ckpt
