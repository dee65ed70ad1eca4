// Codes of 4 and 8 bits that mean a number together with a scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "format/dtype.h"

namespace torch_ckpt {

// What numbers are that are made of codes, before they are rounded to what
// somebody wants.
inline constexpr Dtype kScaledAs = Dtype::kF32;

// Whether elements of `codes` times scales of `scales` are elements of `to`:
// codes are F8_E4M3, F8_E5M2 or F4, scales F32, BF16, F16 or F8_E8M0, and `to`
// is F64, F32, BF16 or F16.
bool CanScale(Dtype codes, Dtype scales, Dtype to);

// The scales of a box of codes, of which `blocks` have one in common.
Box BoxOfScales(const Box& codes, const Dims& blocks);

// The scales of a box of a tensor of codes.
class Scales {
 public:
  // shape: of the tensor, in elements. blocks: how many elements have a scale
  // in common, in each dimension; the last block of one may be short. `box` is
  // inside the tensor and not empty.
  Scales(Dtype dtype, Dims shape, Dims blocks, const Box& box);

  // Those that are held, in the tensor of scales, which has as many dimensions
  // as that of the codes.
  const Box& held() const { return held_; }
  uint64_t size() const { return size_; }  // bytes of them
  // Theirs, row-major, for whoever fills them; before anybody scales. Takes
  // their memory when it is first called.
  MutableByteSpan bytes() {
    bytes_.resize(size_);
    return bytes_;
  }

  // `count` elements from the first on, which is one of the box, in the
  // row-major order of the tensor: codes at `source`, times their scales in
  // F32, rounded once to `to`, at `target`. Neither needs an alignment. Of F4
  // both `first` and `count` are even. Returns how many values were lost: see
  // CastElements, and finite products that became infinite. REQUIRES:
  // CanScale; elements that are in the box. Thread-safe.
  size_t Scale(Dtype codes, const std::byte* source, Dtype to,
               std::byte* target, uint64_t first, uint64_t count) const;

 private:
  friend std::optional<size_t> ScaleBy(std::string_view, const Scales&, Dtype,
                                       const std::byte*, Dtype, std::byte*,
                                       uint64_t, uint64_t);
  struct Loops;

  size_t ScaleWith(const Loops& loops, const std::byte* source, size_t bits,
                   std::byte* target, size_t target_bytes, uint64_t first,
                   uint64_t count) const;
  size_t ScaleRow(const Loops& loops, const std::byte* source, size_t bits,
                  std::byte* target, size_t target_bytes, uint64_t row,
                  uint64_t column, uint64_t count) const;
  // Of the held ones that of the first column of a row of codes.
  uint64_t RowOfScales(uint64_t row) const;

  const Dtype dtype_;
  const Dims shape_, blocks_;
  const uint64_t columns_;  // of the tensor, and elements of one scale in a row
  const uint64_t block_;
  const Box held_;
  const size_t size_;
  std::vector<std::byte> bytes_;
};

// For tests: by the named implementation, see CastElementsBy.
std::optional<size_t> ScaleBy(std::string_view implementation,
                              const Scales& scales, Dtype codes,
                              const std::byte* source, Dtype to,
                              std::byte* target, uint64_t first,
                              uint64_t count);

}  // namespace torch_ckpt
