#include "engine/write/fill_buffer.h"

#include <algorithm>
#include <cstring>

#include "format/ours/manifest.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

// Below this, combining two digests costs as much as making one of the bytes.
constexpr uint64_t kMinDigested = uint64_t{64} << 10;

}  // namespace

SegmentDigester::SegmentDigester(uint32_t* digests, uint64_t offset)
    : digests_(digests),
      first_segment_(offset / kSegmentBytes),
      offset_(offset) {}

void SegmentDigester::Add(ByteSpan bytes) {
  while (!bytes.empty()) {
    const uint64_t left = kSegmentBytes - offset_ % kSegmentBytes;
    const ByteSpan part = bytes.first(std::min<uint64_t>(bytes.size(), left));
    uint32_t& digest = digests_[offset_ / kSegmentBytes - first_segment_];
    digest = Crc32c(digest, part.data(), part.size());
    offset_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void SegmentDigester::Add(uint32_t crc, uint64_t bytes) {
  if (bytes == 0) return;
  uint32_t& digest = digests_[offset_ / kSegmentBytes - first_segment_];
  // The first bytes of a segment need no combining.
  digest =
      offset_ % kSegmentBytes == 0 ? crc : Crc32cCombine(digest, crc, bytes);
  offset_ += bytes;
}

uint64_t FillBuffer::SegmentEnd(uint64_t at) const {
  return ((offset_ + at) / kSegmentBytes + 1) * kSegmentBytes - offset_;
}

template <class Step>
bool FillBuffer::Extend(uint64_t at, uint64_t bytes, const Step& step) {
  const bool goes_on =
      !digested_.empty() && digested_.back().at + digested_.back().bytes == at;
  if (!goes_on && at != 0 && bytes < kMinDigested) return false;
  for (const uint64_t end = at + bytes; at < end;) {
    const uint64_t part = std::min(end, SegmentEnd(at)) - at;
    if (digested_.empty() ||
        digested_.back().at + digested_.back().bytes != at ||
        SegmentEnd(digested_.back().at) <= at) {
      digested_.push_back({at, 0, 0});
    }
    Digested& last = digested_.back();
    last.crc = step(last.crc, at, part);
    last.bytes += part;
    at += part;
  }
  return true;
}

void FillBuffer::Copy(uint64_t at, ByteSpan bytes) {
  std::byte* const to = out_.data() + at;
  Filled(bytes.size());
  if (copies_ == Copies::kStreamed) {
    StreamCopy(to, bytes.data(), bytes.size());
    return;
  }
  if (copies_ == Copies::kDigested &&
      Extend(at, bytes.size(), [&](uint32_t crc, uint64_t part, uint64_t size) {
        return Crc32cCopy(crc, out_.data() + part, bytes.data() + (part - at),
                          size);
      })) {
    return;
  }
  std::memcpy(to, bytes.data(), bytes.size());
}

void FillBuffer::Made(uint64_t at, uint64_t bytes) {
  if (copies_ != Copies::kDigested) return;
  (void)Extend(at, bytes, [&](uint32_t crc, uint64_t part, uint64_t size) {
    return Crc32c(crc, out_.data() + part, size);
  });
}

void FillBuffer::Made(uint64_t at, uint64_t bytes, uint32_t crc32c) {
  if (copies_ == Copies::kDigested) digested_.push_back({at, bytes, crc32c});
}

void FillBuffer::Digest(SegmentDigester* digester) {
  const auto before = [](const Digested& a, const Digested& b) {
    return a.at < b.at;
  };
  if (!std::is_sorted(digested_.begin(), digested_.end(), before)) {
    std::sort(digested_.begin(), digested_.end(), before);
  }
  uint64_t at = 0;
  for (const Digested& each : digested_) {
    digester->Add(out_.subspan(at, each.at - at));
    digester->Add(each.crc, each.bytes);
    at = each.at + each.bytes;
  }
  digester->Add(out_.subspan(at));
}

}  // namespace torch_ckpt
