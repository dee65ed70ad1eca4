#include "engine/write/casts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "engine/write/fill.h"
#include "runtime/crc32c.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

// Elements before they are cast.
constexpr uint64_t kElementBytes = uint64_t{4} << 20;

uint64_t ElementBytes(Dtype dtype) {
  return static_cast<uint64_t>(DtypeBits(dtype)) / 8;
}

}  // namespace

// Sections of one provider's things that are made together: a device is waited
// for once.
class Casts::Batch {
 public:
  Batch(MutableByteSpan scratch, FillBuffer* buffer)
      : elements_(scratch.first(kElementBytes)),
        rest_(scratch.subspan(kElementBytes)),
        buffer_(buffer) {}

  // REQUIRES: its elements are not more than kElementBytes.
  Status Add(Section section) {
    const uint64_t bytes = section.count * section.thing->from_bytes;
    if (!sections_.empty() &&
        (sections_.back().thing->of.provider != section.thing->of.provider ||
         used_ + bytes > kElementBytes)) {
      TC_RETURN_IF_ERROR(Cast());
    }
    section.elements_at = used_;
    used_ += bytes;
    sections_.push_back(section);
    return {};
  }

  Status Cast() {
    if (sections_.empty()) return {};
    Provider* const provider = sections_.front().thing->of.provider;
    std::vector<Portion> portions = {{provider, {}}};
    for (const Section& section : sections_) {
      const uint64_t each = section.thing->from_bytes;
      portions[0].stretches.push_back(
          {section.thing->of.index, section.first * each, section.count * each,
           section.elements_at});
    }
    FillBuffer elements(elements_.first(used_), 0, buffer_->worker(),
                        FillBuffer::Copies::kCached);
    TC_RETURN_IF_ERROR(FillPortions(portions, rest_, &elements));
    for (const Section& section : sections_) {
      Casts::Cast(section, elements_.data() + section.elements_at, buffer_);
    }
    sections_.clear();
    used_ = 0;
    return {};
  }

 private:
  const MutableByteSpan elements_, rest_;
  FillBuffer* const buffer_;
  std::vector<Section> sections_;
  uint64_t used_ = 0;
};

Origin Casts::Add(Origin of, Dtype from, Dtype to, std::string fqn) {
  Thing& thing = things_.emplace_back();
  thing.of = of;
  thing.from = from;
  thing.to = to;
  thing.from_bytes = ElementBytes(from);
  thing.to_bytes = ElementBytes(to);
  thing.fqn = std::move(fqn);
  scratch_bytes_ = std::max(
      scratch_bytes_,
      kElementBytes + RoundUp(of.provider->ScratchBytes(), kScratchAlignment));
  if (locker_ == nullptr) locker_ = of.provider->Locker();
  return {this, things_.size() - 1};
}

Status Casts::Check() const {
  for (const Thing& thing : things_) {
    TC_RETURN_IF_ERROR(LostInCast(thing.lost, thing.from, thing.to, thing.fqn));
  }
  return {};
}

Casts::Section Casts::SectionOf(Thing* thing, const Stretch& stretch) {
  const uint64_t first = stretch.from / thing->to_bytes;
  const uint64_t last =
      (stretch.from + stretch.bytes + thing->to_bytes - 1) / thing->to_bytes;
  return {thing, stretch, first, last - first, 0};
}

// `elements` is where the section's first one is.
void Casts::Cast(const Section& section, const std::byte* elements,
                 FillBuffer* buffer) {
  Thing& thing = *section.thing;
  const Stretch& stretch = section.stretch;
  const MutableByteSpan out = buffer->Out(stretch.at, stretch.bytes);
  buffer->Filled(out.size());
  if (stretch.from % thing.to_bytes != 0 ||
      stretch.bytes % thing.to_bytes != 0) {
    // It cuts an element.
    std::vector<std::byte> whole(section.count * thing.to_bytes);
    // An element is counted where it begins.
    const uint64_t head = stretch.from % thing.to_bytes != 0 ? 1 : 0;
    CastElements(thing.from, elements, thing.to, whole.data(), head);
    thing.lost += CastElements(thing.from, elements + head * thing.from_bytes,
                               thing.to, whole.data() + head * thing.to_bytes,
                               section.count - head);
    std::memcpy(out.data(),
                whole.data() + (stretch.from - section.first * thing.to_bytes),
                out.size());
    return;
  }
  const uint64_t step = kDigestStep / thing.to_bytes;
  for (uint64_t at = 0; at < section.count; at += step) {
    const uint64_t count = std::min(step, section.count - at);
    const uint64_t to = at * thing.to_bytes;
    const size_t lost =
        CastElements(thing.from, elements + at * thing.from_bytes, thing.to,
                     out.data() + to, count);
    if (lost > 0) thing.lost += lost;
    buffer->Made(stretch.at + to, count * thing.to_bytes);
  }
}

Status Casts::Fill(const std::vector<Stretch>& stretches,
                   MutableByteSpan scratch, FillBuffer* buffer) {
  Batch batch(scratch, buffer);
  for (Stretch stretch : stretches) {
    Thing& thing = things_[stretch.index];
    const Section whole = SectionOf(&thing, stretch);
    const std::byte* const found =
        thing.of.provider->Find({thing.of.index, whole.first * thing.from_bytes,
                                 whole.count * thing.from_bytes, 0});
    if (found != nullptr) {
      Cast(whole, found, buffer);
      continue;
    }
    // Up to elements that fill the scratch.
    const uint64_t most = kElementBytes / thing.from_bytes;
    while (stretch.bytes > 0) {
      const uint64_t until =
          (stretch.from / thing.to_bytes + most) * thing.to_bytes;
      Stretch head = stretch;
      head.bytes = std::min(stretch.bytes, until - stretch.from);
      TC_RETURN_IF_ERROR(batch.Add(SectionOf(&thing, head)));
      stretch.from += head.bytes;
      stretch.at += head.bytes;
      stretch.bytes -= head.bytes;
    }
  }
  return batch.Cast();
}

}  // namespace torch_ckpt
