// Memory through which one process hands another one item after the other: a
// few slots, and for each the number of times that it was filled and freed.
//
// Item i goes through slot i % kSlots. Who fills waits until the reader has
// freed the slot's earlier item, and the reader until the item is there; items
// may be filled and freed by several threads and out of order, as long as
// threads begin with items in ascending order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "os/local_socket.h"

namespace torch_ckpt {

class SlotQueue {
 public:
  static constexpr uint64_t kSlots = 8;
  // Of shared memory that a queue takes.
  static constexpr uint64_t Bytes(uint64_t slot_bytes) {
    return kHeaderBytes + kSlots * slot_bytes;
  }

  SlotQueue() = default;
  // Over `memory`, which is full of zeros when the first of both sides comes,
  // and outlives the queue. REQUIRES: aligned to a page.
  SlotQueue(std::byte* memory, uint64_t slot_bytes)
      : memory_(memory), slot_bytes_(slot_bytes) {}

  std::byte* slot(uint64_t item) const {
    return memory_ + kHeaderBytes + item % kSlots * slot_bytes_;
  }
  // Wait; errors are those of `still_wanted`, which is asked now and then.
  Status WaitFree(uint64_t item, const StillWanted& still_wanted) const;
  Status WaitFilled(uint64_t item, const StillWanted& still_wanted) const;
  void Fill(uint64_t item) const;
  void Free(uint64_t item) const;

 private:
  static constexpr uint64_t kHeaderBytes = 4096;
  using Word = std::atomic<uint32_t>;
  // Each on a cache line of its own.
  Word* Filled(uint64_t item) const { return WordAt(item % kSlots); }
  Word* Freed(uint64_t item) const { return WordAt(kSlots + item % kSlots); }
  Word* WordAt(uint64_t line) const {
    return reinterpret_cast<Word*>(memory_ + line * 64);
  }

  std::byte* memory_ = nullptr;
  uint64_t slot_bytes_ = 0;
};

}  // namespace torch_ckpt
