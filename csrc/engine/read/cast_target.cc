#include "engine/read/cast_target.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "plan/copy_run.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Elements that are cast before they are copied to where they belong: so few
// that both stay in a core's second cache.
constexpr uint64_t kStepElements = 8192;
using Step = std::array<std::byte, kStepElements * sizeof(double)>;
// Rows of this many are cast by themselves.
constexpr uint64_t kLongRow = 1024;

// The run of `count` indices of its first loop, from `first` on.
Run Indices(Run run, int64_t first, int64_t count) {
  run.src += static_cast<uint64_t>(first * run.src_stride[0]);
  run.dst += static_cast<uint64_t>(first * run.dst_stride[0]);
  run.count[0] = count;
  return run;
}

}  // namespace

CastTarget::CastTarget(std::string fqn, std::byte* data, Dtype from, Dtype to)
    : data_(data), converter_(std::move(fqn), from, to) {}

uint64_t CastTarget::Deliver(const Run& run, const std::byte* bytes) {
  return run.loops == 0 ? DeliverBytes(run.dst, bytes, run.bytes)
                        : DeliverLoops(run, bytes);
}

Status CastTarget::Finish() {
  const std::lock_guard lock(mutex_);
  for (const auto& [element, bytes] : kept_) {
    AddLost(Cast(element, bytes.data(), 1));
  }
  kept_.clear();
  return converter_.Check();
}

uint64_t CastTarget::DeliverBytes(uint64_t dst, const std::byte* bytes,
                                  uint64_t count) {
  const uint64_t into = dst % converter_.from_bytes();
  const uint64_t head =
      into == 0 ? 0 : std::min(count, converter_.from_bytes() - into);
  const uint64_t tail = (count - head) % converter_.from_bytes();
  const uint64_t whole = count - head - tail;
  if (head > 0) Keep(dst, bytes, head);
  if (tail > 0) Keep(dst + head + whole, bytes + head + whole, tail);
  if (whole == 0) return 0;
  return Cast((dst + head) / converter_.from_bytes(), bytes + head,
              whole / converter_.from_bytes());
}

void CastTarget::Keep(uint64_t dst, const std::byte* bytes, uint64_t count) {
  const std::lock_guard lock(mutex_);
  std::array<std::byte, 8>& element = kept_[dst / converter_.from_bytes()];
  std::memcpy(element.data() + dst % converter_.from_bytes(), bytes, count);
}

uint64_t CastTarget::DeliverLoops(const Run& run, const std::byte* bytes) {
  const Run inner = InnerRun(run);
  const uint64_t slice = inner.TotalBytes() / converter_.from_bytes();
  // Rows that are no whole elements are clipped ones of expanded tensors.
  const bool cut = run.dst % converter_.from_bytes() != 0 ||
                   run.bytes % converter_.from_bytes() != 0;
  const bool apart = cut || slice > kStepElements ||
                     run.bytes / converter_.from_bytes() >= kLongRow;
  const auto at_once = apart ? 1 : static_cast<int64_t>(kStepElements / slice);
  uint64_t lost = 0;
  for (int64_t i = 0; i < run.count[0]; i += at_once) {
    const Run part = Indices(run, i, std::min(at_once, run.count[0] - i));
    const std::byte* const from = bytes + (part.src - run.src);
    lost += apart ? Deliver(InnerRun(part), from) : DeliverBlock(part, from);
  }
  return lost;
}

uint64_t CastTarget::DeliverBlock(const Run& run, const std::byte* bytes) {
  Step stored, cast;
  // Its rows one after another, and from there to their places.
  Run gather = run, scatter = run;
  gather.dst = scatter.src = 0;
  auto dense = static_cast<int64_t>(run.bytes);
  for (int l = run.loops - 1; l >= 0; --l) {
    const auto at = static_cast<size_t>(l);
    gather.dst_stride[at] = dense;
    scatter.src_stride[at] = InTarget(dense);
    scatter.dst_stride[at] = InTarget(run.dst_stride[at]);
    dense *= run.count[at];
  }
  scatter.bytes =
      static_cast<uint64_t>(InTarget(static_cast<int64_t>(run.bytes)));
  scatter.dst = static_cast<uint64_t>(InTarget(static_cast<int64_t>(run.dst)));
  CopyRun(gather, bytes, run.src, stored.data(), 0);
  const uint64_t lost =
      converter_.Cast(stored.data(), cast.data(),
                      static_cast<uint64_t>(dense) / converter_.from_bytes());
  CopyRun(scatter, cast.data(), 0, data_, 0);
  return lost;
}

uint64_t CastTarget::Cast(uint64_t element, const std::byte* bytes,
                          uint64_t count) {
  // By way of the cache, and from there past it: what is overwritten need not
  // be read.
  const uint64_t from_bytes = converter_.from_bytes();
  const uint64_t to_bytes = converter_.to_bytes();
  Step step;
  uint64_t lost = 0;
  for (uint64_t at = 0; at < count; at += kStepElements) {
    const uint64_t size = std::min(kStepElements, count - at);
    lost += converter_.Cast(bytes + at * from_bytes, step.data(), size);
    StreamCopy(data_ + (element + at) * to_bytes, step.data(), size * to_bytes);
  }
  return lost;
}

}  // namespace torch_ckpt
