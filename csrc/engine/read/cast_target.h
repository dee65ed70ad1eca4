// Memory whose elements are cast from stored ones as they arrive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/status.h"
#include "plan/runs.h"
#include "values/cast.h"

namespace torch_ckpt {

class CastTarget {
 public:
  // Errors name `fqn`. `data` is the first element. REQUIRES: CanCast(from,
  // to).
  CastTarget(std::string fqn, std::byte* data, Dtype from, Dtype to);

  // Casts the elements of `run`, whose source begins at `bytes`; its `dst` is
  // where they would be if the memory, from 0 on, had elements of `from`.
  // Returns how many were lost, see CastElements. Of an element that the run
  // begins or ends in, the bytes are kept until Finish. What is delivered again
  // takes the place of what was. Thread-safe for runs that share no byte.
  uint64_t Deliver(const Run& run, const std::byte* bytes);
  void AddLost(uint64_t count) { converter_.AddLost(count); }

  // When all is delivered: casts what was kept. kInvalidArgument if values are
  // lost.
  Status Finish();

 private:
  uint64_t DeliverBytes(uint64_t dst, const std::byte* bytes, uint64_t count);
  uint64_t DeliverLoops(const Run& run, const std::byte* bytes);
  // As many elements as a step holds at most.
  uint64_t DeliverBlock(const Run& run, const std::byte* bytes);
  // Bytes of one element, not all.
  void Keep(uint64_t dst, const std::byte* bytes, uint64_t count);
  uint64_t Cast(uint64_t element, const std::byte* bytes, uint64_t count);
  // Where in the memory byte `dst` of elements of `from` is.
  int64_t InTarget(int64_t dst) const {
    return dst / static_cast<int64_t>(converter_.from_bytes()) *
           static_cast<int64_t>(converter_.to_bytes());
  }

  std::byte* const data_;
  Converter converter_;
  std::mutex mutex_;
  // Elements that are cut, by number; guarded by mutex_.
  std::map<uint64_t, std::array<std::byte, 8>> kept_;
};

}  // namespace torch_ckpt
