// Elements of one float type as elements of another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/dtype.h"
#include "values/scaled.h"

namespace torch_ckpt {

// Whether elements of `from` can be cast to `to`: both are F64, F32, F16, BF16,
// F8_E4M3 or F8_E5M2.
bool CanCast(Dtype from, Dtype to);

// `count` elements at `source` to `target`, which does not overlap it; neither
// needs an alignment. The value of every element is that of `tensor.to(dtype)`
// in torch 2.13: rounded to nearest, ties to even, by way of float32; what is
// too large becomes infinite, or 448 in F8_E4M3, which has no infinity (NaN in
// older torches). A NaN stays a NaN, of whatever bits. Returns how many were
// lost: finite ones that round to more than the largest number of `to`, and
// infinite ones where it has no infinity. REQUIRES: CanCast. Thread-safe.
size_t CastElements(Dtype from, const std::byte* source, Dtype to,
                    std::byte* target, size_t count);

// The elements of a tensor as elements of another type, part by part, counted
// in units (format/dtype.h). From several threads at once.
class Converter {
 public:
  // Errors name `fqn`. REQUIRES: CanCast(from, to), or CanScale and scales for
  // every Cast.
  Converter(std::string fqn, Dtype from, Dtype to);

  uint64_t from_bytes() const { return from_bytes_; }  // of a unit
  uint64_t to_bytes() const { return to_bytes_; }      // of its elements

  // As CastElements; of codes with `scales`, as Scales::Scale, where `first` is
  // the first unit in the row-major order of the tensor. What was lost is the
  // caller's to count, who may cast again what it casts now.
  uint64_t Cast(const std::byte* source, std::byte* target, uint64_t count,
                const Scales* scales = nullptr, uint64_t first = 0) const {
    if (scales == nullptr) {
      return CastElements(from_, source, to_, target, count);
    }
    return scales->Scale(from_, source, to_, target, first * unit_,
                         count * unit_);
  }
  void AddLost(uint64_t count) {
    if (count > 0) lost_ += count;
  }
  // kInvalidArgument where values were lost.
  Status Check() const;

 private:
  const std::string fqn_;
  const Dtype from_, to_;
  const uint64_t unit_, from_bytes_, to_bytes_;
  std::atomic<uint64_t> lost_{0};
};

// For tests: by the named implementation ("portable", "avx2", "avx512");
// nullopt where this CPU or build does not have it.
std::optional<size_t> CastElementsBy(std::string_view implementation,
                                     Dtype from, const std::byte* source,
                                     Dtype to, std::byte* target, size_t count);

}  // namespace torch_ckpt
