// What an output is made of, a file or a region of memory: which of its bytes
// come from where.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

class Provider;  // engine/write/provider.h

// One of the things whose bytes a provider makes: a tensor, a text, a file.
struct Origin {
  Provider* provider = nullptr;  // outlives whoever names it
  uint64_t index = 0;            // of the thing, as its provider counts
};

// Bytes [begin, end) of an output are those of `origin` from `from` on.
struct Extent {
  uint64_t begin = 0;
  uint64_t end = 0;
  Origin origin;
  uint64_t from = 0;
};

// Extents of one output, ascending. Between them there may be bytes that are
// somebody else's to make, and that must not be asked for. Reading is
// thread-safe.
class ExtentList {
 public:
  void Reserve(size_t extents) { extents_.reserve(extents); }
  // The thing's first `bytes` bytes, at the end of the list; nothing where
  // there are none.
  void Append(Origin origin, uint64_t bytes) {
    Place(size(), bytes, origin, 0);
  }
  // REQUIRES: `at` is not before the end of the list.
  void Place(uint64_t at, uint64_t bytes, Origin origin, uint64_t from) {
    if (bytes > 0) extents_.push_back({at, at + bytes, origin, from});
  }

  uint64_t size() const { return extents_.empty() ? 0 : extents_.back().end; }
  const std::vector<Extent>& extents() const { return extents_; }

  // Calls fn(origin, from, bytes) for what is in [begin, begin + bytes), in
  // ascending order. REQUIRES: the list has all of it.
  template <class Fn>
  void ForEach(uint64_t begin, uint64_t bytes, const Fn& fn) const {
    auto extent = std::upper_bound(
        extents_.begin(), extents_.end(), begin,
        [](uint64_t at, const Extent& e) { return at < e.end; });
    for (const uint64_t end = begin + bytes; begin < end; ++extent) {
      const uint64_t size = std::min(end, extent->end) - begin;
      fn(extent->origin, extent->from + (begin - extent->begin), size);
      begin += size;
    }
  }

 private:
  std::vector<Extent> extents_;
};

}  // namespace torch_ckpt
