#include "engine/write/output_crcs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/crc32.h"

namespace torch_ckpt {

OutputCrcs::OutputCrcs(std::vector<ByteRange> ranges)
    : ranges_(std::move(ranges)), added_(ranges_.size()) {}

void OutputCrcs::Add(uint64_t offset, ByteSpan bytes) {
  const uint64_t end = offset + bytes.size();
  auto range =
      std::partition_point(ranges_.begin(), ranges_.end(),
                           [&](const ByteRange& r) { return r.end <= offset; });
  for (; range != ranges_.end() && range->begin < end; ++range) {
    const ByteRange both{std::max(offset, range->begin),
                         std::min(end, range->end)};
    const uint32_t crc =
        Crc32(0, bytes.data() + (both.begin - offset), both.size());
    const std::lock_guard lock(mutex_);
    added_[static_cast<size_t>(range - ranges_.begin())].push_back({both, crc});
  }
}

Result<uint32_t> OutputCrcs::Find(size_t range) {
  const std::lock_guard lock(mutex_);
  std::vector<Added>& added = added_[range];
  std::sort(added.begin(), added.end(), [](const Added& a, const Added& b) {
    return a.bytes.begin < b.bytes.begin;
  });
  uint32_t crc = 0;
  uint64_t at = ranges_[range].begin;
  for (const Added& each : added) {
    if (each.bytes.begin != at) break;
    crc = Crc32Combine(crc, each.crc32, each.bytes.size());
    at = each.bytes.end;
  }
  if (at == ranges_[range].end) return crc;
  return Internal("bytes " + std::to_string(at) + " to " +
                  std::to_string(ranges_[range].end) +
                  " were not digested: this is a bug of torch_ckpt");
}

}  // namespace torch_ckpt
