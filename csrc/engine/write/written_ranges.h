// Which bytes of a file have been written, by whomever, and their digests.
#pragma once

#include <cstdint>
#include <vector>

#include "base/byte_range.h"
#include "base/status.h"

namespace torch_ckpt {

// Bytes that were written, with the CRC-32C of the part in each segment.
struct WrittenRange {
  ByteRange bytes;
  std::vector<uint32_t> crc32c;
};

// How many segments of its file a range touches.
uint64_t SegmentCount(const ByteRange& range);

// What [0, bytes) has beside `ranges`, in ascending order. kConflict where two
// of them overlap or one goes beyond the end; says which bytes.
Result<std::vector<ByteRange>> Holes(const std::vector<WrittenRange>& ranges,
                                     uint64_t bytes);

// The digests of the segments of a file of `bytes` bytes, of the ranges in any
// order that all its writers have written. kIncomplete where nobody has written
// a byte, kConflict as Holes.
Result<std::vector<uint32_t>> CombineRanges(std::vector<WrittenRange> ranges,
                                            uint64_t bytes);

}  // namespace torch_ckpt
