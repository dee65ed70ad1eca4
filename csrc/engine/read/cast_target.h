// Dense memory whose elements are cast from stored ones as they arrive.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "format/dtype.h"
#include "plan/runs.h"

namespace torch_ckpt {

class CastTarget {
 public:
  // `data` is the first element. REQUIRES: CanCast(from, to).
  CastTarget(std::byte* data, Dtype from, Dtype to);

  // Casts the elements of `run`, whose source begins at `bytes`; its `dst` is
  // where they would be if the memory, from 0 on, had elements of `from`. An
  // element that files cut waits for its other bytes. Thread-safe for runs that
  // share no byte.
  void Deliver(const Run& run, const std::byte* bytes);

  // Of the elements until now, see CastElements.
  uint64_t lost() const { return lost_; }

 private:
  // An element of which some bytes are there.
  struct CutElement {
    std::array<std::byte, 8> bytes;
    uint64_t count = 0;
  };

  // Of loops [level, run.loops). All of these return how many were lost.
  uint64_t DeliverLoops(const Run& run, int level, uint64_t dst,
                        const std::byte* bytes);
  uint64_t DeliverBytes(uint64_t dst, const std::byte* bytes, uint64_t count);
  // Bytes of one element, not all.
  uint64_t DeliverCut(uint64_t dst, const std::byte* bytes, uint64_t count);
  uint64_t Cast(uint64_t element, const std::byte* bytes, uint64_t count);

  std::byte* const data_;
  const Dtype from_, to_;
  const uint64_t from_bytes_, to_bytes_;  // of an element
  std::atomic<uint64_t> lost_{0};
  std::mutex mutex_;
  std::map<uint64_t, CutElement> cut_;  // by number; guarded by mutex_
};

}  // namespace torch_ckpt
