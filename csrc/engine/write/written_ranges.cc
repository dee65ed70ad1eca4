#include "engine/write/written_ranges.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "format/ours/manifest.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

std::string Text(uint64_t begin, uint64_t end) {
  return "bytes " + std::to_string(begin) + " to " + std::to_string(end);
}

std::vector<const WrittenRange*> Sorted(
    const std::vector<WrittenRange>& ranges) {
  std::vector<const WrittenRange*> sorted;
  sorted.reserve(ranges.size());
  for (const WrittenRange& range : ranges) sorted.push_back(&range);
  std::sort(sorted.begin(), sorted.end(),
            [](const WrittenRange* a, const WrittenRange* b) {
              return a->bytes.begin != b->bytes.begin
                         ? a->bytes.begin < b->bytes.begin
                         : a->bytes.end < b->bytes.end;
            });
  return sorted;
}

}  // namespace

uint64_t SegmentCount(const ByteRange& range) {
  if (range.begin >= range.end) return 0;
  return (range.end - 1) / kSegmentBytes - range.begin / kSegmentBytes + 1;
}

Result<std::vector<ByteRange>> Holes(const std::vector<WrittenRange>& ranges,
                                     uint64_t bytes) {
  std::vector<ByteRange> holes;
  uint64_t at = 0;
  for (const WrittenRange* range : Sorted(ranges)) {
    const auto [begin, end] = range->bytes;
    if (begin > end || end > bytes) {
      return Conflict(Text(begin, end) + " were written of a file of " +
                      std::to_string(bytes));
    }
    if (begin < at) {
      return Conflict(Text(begin, std::min(at, end)) + " were written twice");
    }
    if (begin > at) holes.push_back({at, begin});
    at = end;
  }
  if (at < bytes) holes.push_back({at, bytes});
  return holes;
}

Result<std::vector<uint32_t>> CombineRanges(std::vector<WrittenRange> ranges,
                                            uint64_t bytes) {
  TC_ASSIGN_OR_RETURN(const std::vector<ByteRange> holes, Holes(ranges, bytes));
  if (!holes.empty()) {
    return Incomplete(Text(holes[0].begin, holes[0].end) +
                      " were written by nobody");
  }
  std::vector<uint32_t> digests(SegmentCount({0, bytes}), 0);
  for (const WrittenRange* range : Sorted(ranges)) {
    if (range->crc32c.size() != SegmentCount(range->bytes)) {
      return InvalidArgument(Text(range->bytes.begin, range->bytes.end) +
                             " have another number of digests than segments");
    }
    uint64_t at = range->bytes.begin;
    for (const uint32_t crc : range->crc32c) {
      const uint64_t end = std::min(
          range->bytes.end, RoundDown(at, kSegmentBytes) + kSegmentBytes);
      uint32_t& digest = digests[at / kSegmentBytes];
      digest =
          at % kSegmentBytes == 0 ? crc : Crc32cCombine(digest, crc, end - at);
      at = end;
    }
  }
  return digests;
}

}  // namespace torch_ckpt
