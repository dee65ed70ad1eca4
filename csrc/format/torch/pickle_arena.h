// Where what is read of a pickle is kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "format/torch/pickle.h"
#include "os/memory.h"

namespace torch_ckpt {

// What values point to, in blocks that are freed together. Large ones are of
// the system's huge pages: giving small ones takes as long as all else.
class PickleArena {
 public:
  explicit PickleArena(size_t limit) : limit_(limit) {}
  PickleArena(const PickleArena&) = delete;
  PickleArena& operator=(const PickleArena&) = delete;
  ~PickleArena() {
    for (const auto& [data, size] : mapped_) UnmapMemory(data, size);
  }

  // Whether the last thing that was made, `size` values from `values` on, can
  // have `more` behind it; then it has.
  bool Lengthen(const PickleValue* values, size_t size, size_t more) {
    const size_t bytes = more * sizeof(PickleValue);
    if (reinterpret_cast<const std::byte*>(values + size) != at_ ||
        bytes > left_) {
      return false;
    }
    at_ += bytes;
    left_ -= bytes;
    return true;
  }
  // Null above the limit, and where there is no memory. What is there is not
  // initialised; T needs no destructor.
  template <class T>
  T* New(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > left_ && !Grow(bytes)) return nullptr;
    // Blocks are aligned for any of the types, which are multiples of 8 bytes.
    auto* made = reinterpret_cast<T*>(at_);
    at_ += bytes;
    left_ -= bytes;
    return made;
  }

 private:
  static constexpr size_t kMinBlock = size_t{1} << 14;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kMaxBlock = size_t{64} << 20;

  bool Grow(size_t bytes) {
    next_ = std::min(std::max(kMinBlock, 2 * next_), kMaxBlock);
    size_t size = RoundUp(std::max(bytes, next_), next_);
    if (size > limit_ - used_) size = RoundUp(bytes, kMinBlock);
    if (size > limit_ - used_) return false;
    if (size >= kHugePage) {
      const Result<std::byte*> mapped = MapMemory(size, kHugePage);
      if (!mapped.ok()) return false;
      mapped_.emplace_back(at_ = *mapped, size);
    } else {
      small_.push_back(std::make_unique_for_overwrite<std::byte[]>(size));
      at_ = small_.back().get();
    }
    used_ += size;
    left_ = size;
    return true;
  }

  const size_t limit_;
  size_t used_ = 0, next_ = 0, left_ = 0;
  std::byte* at_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> small_;
  std::vector<std::pair<std::byte*, size_t>> mapped_;
};

}  // namespace torch_ckpt
