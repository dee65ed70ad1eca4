// Waiting for a word of shared memory to change (futex(2)).
#pragma once

#include <atomic>
#include <cstdint>

namespace torch_ckpt {

// Waits while `*word` is `value`, for `wait_ms` at most. False where that time
// has passed, or a signal has come; true may mean nothing, too.
bool WaitWord(const std::atomic<uint32_t>* word, uint32_t value, int wait_ms);
// Wakes whoever waits for it, in any process that has it mapped.
void WakeWord(const std::atomic<uint32_t>* word);

}  // namespace torch_ckpt
