// The chunks of one tensor in stock's .metadata. For dcp_metadata.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/box.h"
#include "base/status.h"

namespace torch_ckpt {

// What the metadata says of them, and for which ones it has said a place. Their
// numbers stand side by side: places come rank by rank, so that each asks for
// the chunk of another tensor. In elements as torch counts them, which is
// packed ones as one.
class DcpChunks {
 public:
  // What is kept of a chunk of `rank` dimensions, its place in the catalog
  // included.
  static uint64_t BytesOfEach(int rank) {
    return 32 + 2 * static_cast<uint64_t>(rank) * sizeof(int64_t);
  }

  // Of a tensor of `rank` dimensions, `packed` elements of which are one.
  DcpChunks(int rank, int64_t packed, size_t count);

  // The next one of `count`. kCorrupt where it is of other dimensions.
  Status Add(const Dims& offsets, const Dims& sizes);

  // All that follow REQUIRE: `count` were added.

  // Sets `box`, in single elements, to that of the chunk at `offsets`, which is
  // expected at position `hint` and has a place from now on. kCorrupt where
  // there is none, kConflict where all there have one.
  Status Take(const Dims& offsets, size_t hint, Box* box);
  // That each has a place, or one of the same box has: earlier versions of DCP
  // list a chunk for each rank that has it, and a place for one of them.
  Status CheckAllFound();

 private:
  using Numbers = std::span<const int64_t>;

  Numbers Offsets(size_t at) const {
    return Numbers(numbers_).subspan(2 * at * rank_, rank_);
  }
  Numbers Sizes(size_t at) const {
    return Numbers(numbers_).subspan((2 * at + 1) * rank_, rank_);
  }
  bool IsAt(size_t at, const Dims& offsets) const {
    return std::ranges::equal(Offsets(at), offsets);
  }
  void Sort();
  // The first one in sorted_ with these offsets.
  Result<size_t> Search(const Dims& offsets);

  size_t rank_;
  int64_t packed_;
  std::vector<int64_t> numbers_;  // of each, its offsets and its sizes
  std::vector<bool> found_;       // which have a place
  std::vector<uint32_t> sorted_;  // by offsets; made when it is needed
};

}  // namespace torch_ckpt
