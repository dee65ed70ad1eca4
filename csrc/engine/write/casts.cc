#include "engine/write/casts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "engine/write/fill.h"
#include "plan/ranges.h"
#include "plan/runs.h"
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
    TC_RETURN_IF_ERROR(ReadScales());
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
  // Those of all stretches, at once for each provider.
  Status ReadScales() {
    std::vector<ProviderStretches> asked;
    uint64_t bytes = 0;
    for (CastStretch& cast : stretches_) {
      if (!cast.thing->scaled) continue;
      const ScaleSource& source = *cast.thing->scaled;
      cast.scales = ScalesOf(source, cast, cast.thing->unit);
      if (asked.empty() || asked.back().provider != source.scales.provider) {
        asked.push_back({source.scales.provider, {}});
      }
      const uint64_t size = cast.scales->bytes().size();
      asked.back().stretches.push_back(
          {source.scales.index, FirstScale(source, *cast.scales), size, bytes});
      bytes += size;
    }
    if (bytes == 0) return {};
    std::vector<std::byte> read(bytes);
    FillBuffer buffer(read, 0, buffer_->worker(), FillBuffer::Copies::kCached);
    TC_RETURN_IF_ERROR(FillStretches(asked, rest_, &buffer));
    const std::byte* next = read.data();
    for (const CastStretch& cast : stretches_) {
      if (cast.scales == nullptr) continue;
      const MutableByteSpan into = cast.scales->bytes();
      std::memcpy(into.data(), next, into.size());
      next += into.size();
    }
    return {};
  }

  // What the elements of a stretch, a range of the row-major tensor, need.
  static std::shared_ptr<Scales> ScalesOf(const ScaleSource& source,
                                          const CastStretch& cast,
                                          int64_t unit) {
    const auto first = static_cast<int64_t>(cast.first) * unit;
    const auto past = first + static_cast<int64_t>(cast.count) * unit;
    const std::vector<Box> boxes = BoxesOfRange(source.shape, first, past);
    Box hull = boxes[0];
    for (const Box& box : boxes) {
      for (int d = 0; d < hull.rank(); ++d) {
        const int64_t end = std::max(hull.offsets[d] + hull.sizes[d],
                                     box.offsets[d] + box.sizes[d]);
        hull.offsets[d] = std::min(hull.offsets[d], box.offsets[d]);
        hull.sizes[d] = end - hull.offsets[d];
      }
    }
    return std::make_shared<Scales>(source.of.scale_dtype, source.shape,
                                    source.of.blocks, hull);
  }

  // Where in the bytes of the tensor of scales those begin that are held: such
  // a hull is one stretch of it.
  static uint64_t FirstScale(const ScaleSource& source, const Scales& scales) {
    const Box box = StoredScales(source.of, scales.held());
    const Dims strides =
        DenseStrides(source.of.stored, DtypeBits(source.of.scale_dtype) / 8);
    int64_t first = 0;
    for (int d = 0; d < box.rank(); ++d) first += box.offsets[d] * strides[d];
    return static_cast<uint64_t>(first);
  }

  const MutableByteSpan elements_, rest_;
  FillBuffer* const buffer_;
  std::vector<CastStretch> stretches_;
  uint64_t used_ = 0;
};

Origin Casts::Add(Origin of, Dtype from, Dtype to, std::string fqn,
                  std::optional<ScaleSource> scaled) {
  uint64_t scratch = of.provider->ScratchBytes();
  if (scaled) {
    scratch = std::max(scratch, scaled->scales.provider->ScratchBytes());
  }
  things_.emplace_back(of, std::move(fqn), from, to, std::move(scaled));
  scratch_bytes_ = std::max(
      scratch_bytes_, kElementBytes + RoundUp(scratch, kScratchAlignment));
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
  return {thing, stretch, first, last - first, 0, nullptr};
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
    const Scales* const scales = cast.scales.get();
    converter.Cast(elements, whole.data(), head, scales, cast.first);
    converter.AddLost(converter.Cast(
        elements + head * from_bytes, whole.data() + head * to_bytes,
        cast.count - head, scales, cast.first + head));
    std::memcpy(out.data(),
                whole.data() + (stretch.from - cast.first * to_bytes),
                out.size());
    return;
  }
  const uint64_t step = kDigestStep / to_bytes;
  for (uint64_t at = 0; at < cast.count; at += step) {
    const uint64_t count = std::min(step, cast.count - at);
    const uint64_t to = at * to_bytes;
    converter.AddLost(converter.Cast(elements + at * from_bytes,
                                     out.data() + to, count, cast.scales.get(),
                                     cast.first + at));
    buffer->Made(stretch.at + to, count * to_bytes);
  }
}

Status Casts::Fill(const std::vector<Stretch>& stretches,
                   MutableByteSpan scratch, FillBuffer* buffer) {
  Batch batch(scratch, buffer);
  for (Stretch stretch : stretches) {
    Thing& thing = things_[stretch.index];
    const CastStretch whole = StretchOf(&thing, stretch);
    // Codes wait for their scales.
    const std::byte* const found =
        thing.scaled
            ? nullptr
            : thing.of.provider->Find(
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
