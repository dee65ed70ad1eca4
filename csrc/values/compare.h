// How the elements of two tensors differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/dtype.h"

namespace torch_ckpt {

// |a - b| <= absolute + relative * |b| counts as equal, and so do two NaNs: as
// in torch.isclose.
struct Tolerances {
  double relative = 0, absolute = 0;
};

struct Difference {
  uint64_t count = 0;  // of elements that differ
  // By how much at most; NaN where one of two is a NaN. 0 where only bits
  // differ, and of dtypes that are only compared by bits.
  double largest = 0;

  void Add(const Difference& other);
};

// Of `count` elements each at `x` and `y`, which need no alignment. Elements of
// one dtype without tolerances are compared bit by bit; others as integers, or
// as doubles if one of them is a float or only one is unsigned of 64 bits.
// Those of dtypes that share bytes are compared by bits, and with those of no
// other dtype. Thread-safe. REQUIRES: `count` is a whole number of units of
// both dtypes.
Difference CompareElements(Dtype a, const std::byte* x, Dtype b,
                           const std::byte* y, size_t count,
                           const Tolerances& tolerances);

}  // namespace torch_ckpt
