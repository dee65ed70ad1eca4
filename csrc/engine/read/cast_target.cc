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

CastTarget::CastTarget(std::string fqn, std::byte* data, Dtype from, Dtype to,
                       std::unique_ptr<const CodesTarget> codes)
    : codes_(std::move(codes)),
      home_(data),
      data_(codes_ && codes_->detour
                ? const_cast<std::byte*>(codes_->detour->memory.data())
                : data),
      converter_(std::move(fqn), from, to),
      unit_(DtypeUnit(from).elements),
      element_bytes_(DtypeBits(to) / 8),
      step_units_(kStepElements / static_cast<uint64_t>(unit_)) {}

uint64_t CastTarget::Deliver(uint32_t file, const Run& run,
                             const std::byte* bytes) {
  if (run.loops > 0) return DeliverLoops(file, run, bytes);
  if (!codes_ || !codes_->spread) {
    return DeliverBytes(run.dst, {file, run.src, bytes}, run.bytes);
  }
  uint64_t lost = 0;
  Run part = run;
  for (uint64_t at = 0; at < run.bytes; at += part.bytes) {
    part.src = run.src + at;
    part.dst = run.dst + at;
    part.bytes = std::min(step_units_, run.bytes - at);
    lost += DeliverBlock(file, part, bytes + at);
  }
  return lost;
}

Status CastTarget::Finish() {
  const std::lock_guard lock(mutex_);
  for (const auto& [element, bytes] : kept_) {
    AddLost(Cast(element, {0, 0, bytes.data()}, 1));
  }
  kept_.clear();
  if (codes_ && codes_->detour) {
    CopyRun(codes_->detour->home, data_, 0, home_, 0);
  }
  return converter_.Check();
}

uint64_t CastTarget::DeliverBytes(uint64_t dst, const Stored& from,
                                  uint64_t count) {
  const uint64_t into = dst % converter_.from_bytes();
  const uint64_t head =
      into == 0 ? 0 : std::min(count, converter_.from_bytes() - into);
  const uint64_t tail = (count - head) % converter_.from_bytes();
  const uint64_t whole = count - head - tail;
  if (head > 0) Keep(dst, from.bytes, head);
  if (tail > 0) Keep(dst + head + whole, from.bytes + head + whole, tail);
  if (whole == 0) return 0;
  return Cast((dst + head) / converter_.from_bytes(), from.After(head),
              whole / converter_.from_bytes());
}

// Never of codes, which are bytes.
void CastTarget::Keep(uint64_t dst, const std::byte* bytes, uint64_t count) {
  const std::lock_guard lock(mutex_);
  std::array<std::byte, 8>& element = kept_[dst / converter_.from_bytes()];
  std::memcpy(element.data() + dst % converter_.from_bytes(), bytes, count);
}

uint64_t CastTarget::DeliverLoops(uint32_t file, const Run& run,
                                  const std::byte* bytes) {
  const Run inner = InnerRun(run);
  const uint64_t slice = inner.TotalBytes() / converter_.from_bytes();
  // Rows that are no whole elements are clipped ones of expanded tensors.
  const bool cut = run.dst % converter_.from_bytes() != 0 ||
                   run.bytes % converter_.from_bytes() != 0;
  const bool apart = cut || slice > step_units_ ||
                     run.bytes / converter_.from_bytes() >= kLongRow;
  const auto at_once = apart ? 1 : static_cast<int64_t>(step_units_ / slice);
  uint64_t lost = 0;
  for (int64_t i = 0; i < run.count[0]; i += at_once) {
    const Run part = Indices(run, i, std::min(at_once, run.count[0] - i));
    const std::byte* const from = bytes + (part.src - run.src);
    lost += apart ? Deliver(file, InnerRun(part), from)
                  : DeliverBlock(file, part, from);
  }
  return lost;
}

uint64_t CastTarget::DeliverBlock(uint32_t file, const Run& run,
                                  const std::byte* bytes) {
  Step stored, cast;
  // Its rows one after another, and from there to their places.
  Run gather = run, scatter = run;
  gather.dst = scatter.src = 0;
  auto dense = static_cast<int64_t>(run.bytes);
  for (int l = run.loops - 1; l >= 0; --l) {
    const auto at = static_cast<size_t>(l);
    gather.dst_stride[at] = dense;
    scatter.src_stride[at] = dense /
                             static_cast<int64_t>(converter_.from_bytes()) *
                             static_cast<int64_t>(converter_.to_bytes());
    scatter.dst_stride[at] = InTarget(run.dst_stride[at]);
    dense *= run.count[at];
  }
  scatter.bytes = run.bytes / converter_.from_bytes() * converter_.to_bytes();
  if (codes_ && codes_->spread) SpreadUnits(run.bytes, &scatter);
  scatter.dst = static_cast<uint64_t>(InTarget(static_cast<int64_t>(run.dst)));
  uint64_t lost = 0;
  if (codes_) {
    std::byte* out = cast.data();
    lost = ConvertRows(run, 0, {file, run.src, bytes}, &out);
  } else {
    CopyRun(gather, bytes, run.src, stored.data(), 0);
    lost =
        converter_.Cast(stored.data(), cast.data(),
                        static_cast<uint64_t>(dense) / converter_.from_bytes());
  }
  CopyRun(scatter, cast.data(), 0, data_, 0);
  return lost;
}

void CastTarget::SpreadUnits(uint64_t units, Run* scatter) const {
  const auto add = [&](int64_t count, int64_t from, int64_t to) {
    const auto at = static_cast<size_t>(scatter->loops++);
    scatter->count[at] = count;
    scatter->src_stride[at] = from;
    scatter->dst_stride[at] = to;
  };
  if (units > 1) {
    add(static_cast<int64_t>(units), unit_ * element_bytes_, element_bytes_);
  }
  add(unit_, element_bytes_, *codes_->spread);
  scatter->bytes = static_cast<uint64_t>(element_bytes_);
}

uint64_t CastTarget::ConvertRows(const Run& run, int level, const Stored& from,
                                 std::byte** out) const {
  if (level == run.loops) {
    const uint64_t units = run.bytes / converter_.from_bytes();
    const uint64_t lost = Convert(from, *out, units);
    *out += units * converter_.to_bytes();
    return lost;
  }
  const auto at = static_cast<size_t>(level);
  uint64_t lost = 0;
  if (level == run.loops - 1 &&
      run.src_stride[at] == static_cast<int64_t>(run.bytes)) {
    // In a row there, if not in the target.
    Run row = run;
    row.loops = level;
    row.bytes *= static_cast<uint64_t>(run.count[at]);
    return ConvertRows(row, level, from, out);
  }
  for (int64_t i = 0; i < run.count[at]; ++i) {
    const auto skipped = static_cast<uint64_t>(i * run.src_stride[at]);
    lost += ConvertRows(run, level + 1, from.After(skipped), out);
  }
  return lost;
}

uint64_t CastTarget::Convert(const Stored& from, std::byte* out,
                             uint64_t units) const {
  if (!codes_) return converter_.Cast(from.bytes, out, units);
  uint64_t lost = 0;
  for (uint64_t done = 0; done < units;) {
    const uint64_t bytes = done * converter_.from_bytes();
    const StoredPlaces::Place place =
        codes_->places.Find(from.file, from.offset + bytes);
    const uint64_t size = std::min(units - done, place.units);
    lost +=
        converter_.Cast(from.bytes + bytes, out + done * converter_.to_bytes(),
                        size, codes_->scales.get(), place.first);
    done += size;
  }
  return lost;
}

uint64_t CastTarget::Cast(uint64_t unit, const Stored& from, uint64_t count) {
  // By way of the cache, and from there past it: what is overwritten need not
  // be read.
  const uint64_t to_bytes = converter_.to_bytes();
  Step step;
  uint64_t lost = 0;
  for (uint64_t at = 0; at < count; at += step_units_) {
    const uint64_t size = std::min(step_units_, count - at);
    lost +=
        Convert(from.After(at * converter_.from_bytes()), step.data(), size);
    StreamCopy(data_ + (unit + at) * to_bytes, step.data(), size * to_bytes);
  }
  return lost;
}

}  // namespace torch_ckpt
