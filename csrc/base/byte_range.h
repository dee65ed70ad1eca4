#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_ckpt {

// Bytes [begin, end) of a file.
struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;

  // `bytes` from `begin` on, as far as numbers go: no file is longer.
  static ByteRange Of(uint64_t begin, uint64_t bytes) {
    return {begin, begin + std::min(bytes, UINT64_MAX - begin)};
  }
  uint64_t size() const { return end - begin; }

  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

}  // namespace torch_ckpt
