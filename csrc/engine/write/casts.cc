#include "engine/write/casts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "engine/write/fill.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Elements before they are cast.
constexpr uint64_t kElementBytes = uint64_t{4} << 20;

}  // namespace

// Stretches of one provider's things that are made together: a device is waited
// for once.
class Casts::Batch {
 public:
  Batch(MutableByteSpan scratch, FillBuffer* buffer)
      : elements_(scratch.first(kElementBytes)),
        rest_(scratch.subspan(kElementBytes)),
        buffer_(buffer) {}

  // REQUIRES: its elements are not more than kElementBytes.
  Status Add(CastStretch cast) {
    const uint64_t bytes = cast.count * cast.thing->converter.from_bytes();
    if (!stretches_.empty() &&
        (stretches_.back().thing->of.provider != cast.thing->of.provider ||
         used_ + bytes > kElementBytes)) {
      TC_RETURN_IF_ERROR(Cast());
    }
    cast.elements_at = used_;
    used_ += bytes;
    stretches_.push_back(cast);
    return {};
  }

  Status Cast() {
    if (stretches_.empty()) return {};
    Provider* const provider = stretches_.front().thing->of.provider;
    std::vector<ProviderStretches> asked = {{provider, {}}};
    for (const CastStretch& cast : stretches_) {
      const uint64_t each = cast.thing->converter.from_bytes();
      asked[0].stretches.push_back({cast.thing->of.index, cast.first * each,
                                    cast.count * each, cast.elements_at});
    }
    FillBuffer elements(elements_.first(used_), 0, buffer_->worker(),
                        FillBuffer::Copies::kCached);
    TC_RETURN_IF_ERROR(FillStretches(asked, rest_, &elements));
    for (const CastStretch& cast : stretches_) {
      Casts::Cast(cast, elements_.data() + cast.elements_at, buffer_);
    }
    stretches_.clear();
    used_ = 0;
    return {};
  }

 private:
  const MutableByteSpan elements_, rest_;
  FillBuffer* const buffer_;
  std::vector<CastStretch> stretches_;
  uint64_t used_ = 0;
};

Origin Casts::Add(Origin of, Dtype from, Dtype to, std::string fqn) {
  things_.emplace_back(of, std::move(fqn), from, to);
  scratch_bytes_ = std::max(
      scratch_bytes_,
      kElementBytes + RoundUp(of.provider->ScratchBytes(), kScratchAlignment));
  if (locker_ == nullptr) locker_ = of.provider->Locker();
  return {this, things_.size() - 1};
}

Status Casts::Check() const {
  for (const Thing& thing : things_) {
    TC_RETURN_IF_ERROR(thing.converter.Check());
  }
  return {};
}

Casts::CastStretch Casts::StretchOf(Thing* thing, const Stretch& stretch) {
  const uint64_t first = stretch.from / thing->converter.to_bytes();
  const uint64_t last =
      (stretch.from + stretch.bytes + thing->converter.to_bytes() - 1) /
      thing->converter.to_bytes();
  return {thing, stretch, first, last - first, 0};
}

// `elements` is where the cast's first one is.
void Casts::Cast(const CastStretch& cast, const std::byte* elements,
                 FillBuffer* buffer) {
  Converter& converter = cast.thing->converter;
  const uint64_t from_bytes = converter.from_bytes();
  const uint64_t to_bytes = converter.to_bytes();
  const Stretch& stretch = cast.stretch;
  const MutableByteSpan out = buffer->Out(stretch.at, stretch.bytes);
  buffer->Filled(out.size());
  if (stretch.from % to_bytes != 0 || stretch.bytes % to_bytes != 0) {
    // It cuts an element.
    std::vector<std::byte> whole(cast.count * to_bytes);
    // An element is counted where it begins.
    const uint64_t head = stretch.from % to_bytes != 0 ? 1 : 0;
    converter.Cast(elements, whole.data(), head);
    converter.AddLost(converter.Cast(elements + head * from_bytes,
                                     whole.data() + head * to_bytes,
                                     cast.count - head));
    std::memcpy(out.data(),
                whole.data() + (stretch.from - cast.first * to_bytes),
                out.size());
    return;
  }
  const uint64_t step = kDigestStep / to_bytes;
  for (uint64_t at = 0; at < cast.count; at += step) {
    const uint64_t count = std::min(step, cast.count - at);
    const uint64_t to = at * to_bytes;
    converter.AddLost(
        converter.Cast(elements + at * from_bytes, out.data() + to, count));
    buffer->Made(stretch.at + to, count * to_bytes);
  }
}

Status Casts::Fill(const std::vector<Stretch>& stretches,
                   MutableByteSpan scratch, FillBuffer* buffer) {
  Batch batch(scratch, buffer);
  for (Stretch stretch : stretches) {
    Thing& thing = things_[stretch.index];
    const CastStretch whole = StretchOf(&thing, stretch);
    const std::byte* const found = thing.of.provider->Find(
        {thing.of.index, whole.first * thing.converter.from_bytes(),
         whole.count * thing.converter.from_bytes(), 0});
    if (found != nullptr) {
      Cast(whole, found, buffer);
      continue;
    }
    // Up to elements that fill the scratch.
    const uint64_t most = kElementBytes / thing.converter.from_bytes();
    while (stretch.bytes > 0) {
      const uint64_t until =
          (stretch.from / thing.converter.to_bytes() + most) *
          thing.converter.to_bytes();
      Stretch head = stretch;
      head.bytes = std::min(stretch.bytes, until - stretch.from);
      TC_RETURN_IF_ERROR(batch.Add(StretchOf(&thing, head)));
      stretch.from += head.bytes;
      stretch.at += head.bytes;
      stretch.bytes -= head.bytes;
    }
  }
  return batch.Cast();
}

}  // namespace torch_ckpt
