// Elements of other providers' things, cast to another dtype.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "engine/write/provider.h"
#include "values/cast.h"

namespace torch_ckpt {

class Casts final : public Provider {
 public:
  // The thing whose bytes are those of `of`, elements of `from`, as elements of
  // `to`. Errors name `fqn`. Things are added before anybody fills. REQUIRES:
  // CanCast(from, to).
  Origin Add(Origin of, Dtype from, Dtype to, std::string fqn);

  // When all is filled: whether every value is within the range of its new type
  // (values/cast.h). kInvalidArgument names the first tensor of which one is
  // not.
  Status Check() const;

  uint64_t ScratchBytes() const override { return scratch_bytes_; }
  PageLocker* Locker() const override { return locker_; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  struct Thing {
    Thing(Origin source, std::string fqn, Dtype from, Dtype to)
        : of(source), converter(std::move(fqn), from, to) {}

    const Origin of;
    Converter converter;
  };
  // Elements that a stretch touches, whole or not, and its bytes of them.
  struct CastStretch {
    Thing* thing;
    Stretch stretch;        // after the cast
    uint64_t first, count;  // elements
    uint64_t elements_at;   // in the scratch
  };
  class Batch;

  static CastStretch StretchOf(Thing* thing, const Stretch& stretch);
  static void Cast(const CastStretch& cast, const std::byte* elements,
                   FillBuffer* buffer);

  std::deque<Thing> things_;
  uint64_t scratch_bytes_ = 0;
  PageLocker* locker_ = nullptr;
};

}  // namespace torch_ckpt
