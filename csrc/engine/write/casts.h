// Elements of other providers' things, cast to another dtype.
#pragma once

#include <vector>

#include "engine/write/provider.h"
#include "format/dtype.h"

namespace torch_ckpt {

class Casts final : public Provider {
 public:
  // The thing whose bytes are those of `of`, elements of `from`, as elements of
  // `to`. Things are added before anybody fills. REQUIRES: CanCast(from, to).
  Origin Add(Origin of, Dtype from, Dtype to);

  uint64_t ScratchBytes() const override { return scratch_bytes_; }
  PageLocker* Locker() const override { return locker_; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  struct Thing {
    Origin of;
    Dtype from, to;
    uint64_t from_bytes, to_bytes;  // of an element
  };
  // Elements that a stretch touches, whole or not, and its bytes of them.
  struct Section {
    const Thing* thing;
    Stretch stretch;        // after the cast
    uint64_t first, count;  // elements
    uint64_t elements_at;   // in the scratch
  };
  class Batch;

  static Section SectionOf(const Thing& thing, const Stretch& stretch);
  static void Cast(const Section& section, const std::byte* elements,
                   FillBuffer* buffer);

  std::vector<Thing> things_;
  uint64_t scratch_bytes_ = 0;
  PageLocker* locker_ = nullptr;
};

}  // namespace torch_ckpt
