#include "engine/write/joined_boxes.h"

#include <utility>

#include "engine/write/fill.h"
#include "engine/write/output_files.h"

namespace torch_ckpt {
namespace {

// Small enough that a step is digested while it is in the cache.
constexpr uint64_t kStepBytes = uint64_t{256} << 10;

}  // namespace

void FillFromBoxes(const Stretch& stretch, std::vector<BoxCursor>* cursors,
                   FillBuffer* buffer) {
  const uint64_t end = stretch.from + stretch.bytes;
  for (uint64_t at = stretch.from; at < end;) {
    const uint64_t step = std::min(kStepBytes, end - at);
    const uint64_t to = stretch.at + (at - stretch.from);
    std::byte* const out = buffer->Out(to, step).data();
    for (BoxCursor& cursor : *cursors) {
      const uint64_t until = cursor.box->Before(at + step);
      cursor.box->Scatter(cursor.next, until - cursor.next, cursor.bytes, out,
                          at);
      buffer->Filled(until - cursor.next);
      cursor.bytes += until - cursor.next;
      cursor.next = until;
    }
    buffer->Made(to, step);
    at += step;
  }
}

JoinedBoxes::JoinedBoxes(std::vector<JoinedBox> boxes)
    : boxes_(std::move(boxes)) {
  for (const JoinedBox& box : boxes_) TakeIn(box);
}

void JoinedBoxes::TakeIn(const JoinedBox& box) {
  const Provider& provider = *box.origin.provider;
  origin_scratch_ = std::max(origin_scratch_, provider.ScratchBytes());
  if (provider.Locker() != nullptr) locker_ = provider.Locker();
}

Origin JoinedBoxes::Add(std::vector<JoinedBox> boxes) {
  const uint64_t tensor = boxes_.empty() ? 0 : boxes_.back().tensor + 1;
  for (JoinedBox& box : boxes) {
    box.tensor = tensor;
    TakeIn(box);
    boxes_.push_back(std::move(box));
  }
  return {this, tensor};
}

uint64_t JoinedBoxes::ScratchBytes() const {
  static_assert(kPieceBytes % kScratchAlignment == 0);
  return kPieceBytes + origin_scratch_;
}

Status JoinedBoxes::Gather(const std::vector<Stretch>& stretches,
                           MutableByteSpan scratch, int worker,
                           std::vector<std::vector<BoxCursor>>* cursors) const {
  const MutableByteSpan room = scratch.first(kPieceBytes);
  ExtentList made;  // in `room`
  cursors->resize(stretches.size());
  for (size_t s = 0; s < stretches.size(); ++s) {
    ForEachBoxIn(boxes_, stretches[s],
                 [&](const JoinedBox& box, uint64_t from, uint64_t to) {
                   if (from == to) return;
                   const std::byte* found = box.origin.provider->Find(
                       {box.origin.index, from, to - from, 0});
                   if (found == nullptr) {
                     found = room.data() + made.size();
                     made.Place(made.size(), to - from, box.origin, from);
                   }
                   (*cursors)[s].push_back({&box.box, from, found});
                 });
  }
  FillBuffer buffer(room.first(made.size()), 0, worker,
                    FillBuffer::Copies::kCached);
  return FillStretches(StretchesByProvider(made, 0, made.size()),
                       scratch.subspan(kPieceBytes), &buffer);
}

Status JoinedBoxes::Fill(const std::vector<Stretch>& stretches,
                         MutableByteSpan scratch, FillBuffer* buffer) {
  std::vector<std::vector<BoxCursor>> cursors;
  TC_RETURN_IF_ERROR(Gather(stretches, scratch, buffer->worker(), &cursors));
  for (size_t s = 0; s < stretches.size(); ++s) {
    FillFromBoxes(stretches[s], &cursors[s], buffer);
  }
  return {};
}

}  // namespace torch_ckpt
