// Tensors that are joined of boxes, each with an origin of its own: what
// several ranks, or several tensors of one rank, have of them.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/write/provider.h"
#include "plan/byte_box.h"

namespace torch_ckpt {

struct JoinedBox {
  uint64_t tensor = 0;  // the thing that it is a part of
  ByteBox box;
  Origin origin;  // of the bytes of the box
};

// Calls fn(box, from, to) for those of `boxes`, which ascend by tensor, that
// belong to the tensor of the stretch: bytes [from, to) of the box, which may
// be none, are in it.
template <class Fn>
void ForEachBoxIn(const std::vector<JoinedBox>& boxes, const Stretch& stretch,
                  const Fn& fn) {
  auto box = std::partition_point(
      boxes.begin(), boxes.end(),
      [&](const JoinedBox& each) { return each.tensor < stretch.index; });
  for (; box != boxes.end() && box->tensor == stretch.index; ++box) {
    fn(*box, box->box.Before(stretch.from),
       box->box.Before(stretch.from + stretch.bytes));
  }
}

// Bytes of a box from `next` on, in a row.
struct BoxCursor {
  const ByteBox* box = nullptr;
  uint64_t next = 0;
  const std::byte* bytes = nullptr;
};

// Puts what `cursors` have of the stretch where it belongs in the buffer, and
// moves them on to its end. REQUIRES: what they have of it tiles it.
void FillFromBoxes(const Stretch& stretch, std::vector<BoxCursor>* cursors,
                   FillBuffer* buffer);

class JoinedBoxes final : public Provider {
 public:
  JoinedBoxes() = default;
  // The boxes ascend by tensor. Of what is asked for of a tensor, its boxes
  // tile all.
  explicit JoinedBoxes(std::vector<JoinedBox> boxes);

  // Adds a tensor, the last one, of its boxes: their `tensor` is set here.
  // Before anybody fills.
  Origin Add(std::vector<JoinedBox> boxes);

  const std::vector<JoinedBox>& boxes() const { return boxes_; }
  // What the providers of the boxes want.
  uint64_t origin_scratch() const { return origin_scratch_; }

  // The cursors of all boxes for each of `stretches`, which are a part of an
  // output of at most kPieceBytes: from where the bytes are, or made in
  // `scratch`, of ScratchBytes.
  Status Gather(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
                int worker, std::vector<std::vector<BoxCursor>>* cursors) const;

  uint64_t ScratchBytes() const override;
  PageLocker* Locker() const override { return locker_; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  void TakeIn(const JoinedBox& box);  // what its provider wants

  std::vector<JoinedBox> boxes_;
  uint64_t origin_scratch_ = 0;
  PageLocker* locker_ = nullptr;
};

}  // namespace torch_ckpt
