#include "engine/write/output_crcs.h"

#include <algorithm>
#include <string>

#include "runtime/crc32.h"

namespace torch_ckpt {

OutputCrcs::OutputCrcs(std::vector<ByteRange> ranges)
    : ranges_(std::move(ranges)), parts_(ranges_.size()) {}

void OutputCrcs::Add(uint64_t offset, ByteSpan bytes) {
  const uint64_t end = offset + bytes.size();
  auto range =
      std::partition_point(ranges_.begin(), ranges_.end(),
                           [&](const ByteRange& r) { return r.end <= offset; });
  for (; range != ranges_.end() && range->begin < end; ++range) {
    const uint64_t from = std::max(offset, range->begin);
    const uint64_t size = std::min(end, range->end) - from;
    const uint32_t crc = Crc32(0, bytes.data() + (from - offset), size);
    const std::lock_guard lock(mutex_);
    parts_[static_cast<size_t>(range - ranges_.begin())].push_back(
        {from, size, crc});
  }
}

Result<uint32_t> OutputCrcs::Find(size_t range) {
  const std::lock_guard lock(mutex_);
  std::vector<Part>& parts = parts_[range];
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.begin < b.begin; });
  uint32_t crc = 0;
  uint64_t at = ranges_[range].begin;
  for (const Part& part : parts) {
    if (part.begin != at) break;
    crc = Crc32Combine(crc, part.crc, part.bytes);
    at += part.bytes;
  }
  if (at == ranges_[range].end) return crc;
  return Internal("bytes " + std::to_string(at) + " to " +
                  std::to_string(ranges_[range].end) +
                  " were not digested: this is a bug of torch_ckpt");
}

}  // namespace torch_ckpt
