#include "engine/read/cast_target.h"

#include <algorithm>
#include <cstring>

#include "format/cast.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kStepBytes = uint64_t{32} << 10;

}  // namespace

CastTarget::CastTarget(std::byte* data, Dtype from, Dtype to)
    : data_(data),
      from_(from),
      to_(to),
      from_bytes_(static_cast<uint64_t>(DtypeBits(from)) / 8),
      to_bytes_(static_cast<uint64_t>(DtypeBits(to)) / 8) {}

void CastTarget::Deliver(const Run& run, const std::byte* bytes) {
  lost_ += DeliverLoops(run, 0, run.dst, bytes);
}

uint64_t CastTarget::DeliverLoops(const Run& run, int level, uint64_t dst,
                                  const std::byte* bytes) {
  if (level == run.loops) return DeliverBytes(dst, bytes, run.bytes);
  const auto l = static_cast<size_t>(level);
  uint64_t lost = 0;
  for (int64_t i = 0; i < run.count[l]; ++i) {
    lost += DeliverLoops(run, level + 1, dst, bytes);
    dst += static_cast<uint64_t>(run.dst_stride[l]);
    bytes += run.src_stride[l];
  }
  return lost;
}

uint64_t CastTarget::DeliverBytes(uint64_t dst, const std::byte* bytes,
                                  uint64_t count) {
  const uint64_t into = dst % from_bytes_;
  const uint64_t head = into == 0 ? 0 : std::min(count, from_bytes_ - into);
  const uint64_t tail = (count - head) % from_bytes_;
  const uint64_t whole = count - head - tail;
  uint64_t lost = 0;
  if (head > 0) lost += DeliverCut(dst, bytes, head);
  if (whole > 0) {
    lost += Cast((dst + head) / from_bytes_, bytes + head, whole / from_bytes_);
  }
  if (tail > 0) {
    lost += DeliverCut(dst + head + whole, bytes + head + whole, tail);
  }
  return lost;
}

uint64_t CastTarget::DeliverCut(uint64_t dst, const std::byte* bytes,
                                uint64_t count) {
  const uint64_t element = dst / from_bytes_;
  const std::lock_guard lock(mutex_);
  CutElement& cut = cut_[element];
  std::memcpy(cut.bytes.data() + dst % from_bytes_, bytes, count);
  cut.count += count;
  if (cut.count < from_bytes_) return 0;
  const uint64_t lost = Cast(element, cut.bytes.data(), 1);
  cut_.erase(element);
  return lost;
}

uint64_t CastTarget::Cast(uint64_t element, const std::byte* bytes,
                          uint64_t count) {
  // By way of the cache, and from there past it: what is overwritten need not
  // be read.
  std::array<std::byte, kStepBytes> step;
  const uint64_t most = kStepBytes / to_bytes_;
  uint64_t lost = 0;
  for (uint64_t at = 0; at < count; at += most) {
    const uint64_t size = std::min(most, count - at);
    lost +=
        CastElements(from_, bytes + at * from_bytes_, to_, step.data(), size);
    StreamCopy(data_ + (element + at) * to_bytes_, step.data(),
               size * to_bytes_);
  }
  return lost;
}

}  // namespace torch_ckpt
