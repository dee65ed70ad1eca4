// The least, the largest and the mean of elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "values/numbers.h"

namespace torch_ckpt {

// Holds every double and every integer of 64 bits.
using WideNumber = long double;
static_assert(std::numeric_limits<WideNumber>::digits >= 64);

// Of the elements of one dtype; numbers are those of the finite ones. Complex
// ones are only counted.
struct Statistics {
  uint64_t finite = 0, nan = 0, infinite = 0;
  WideNumber least = 0, largest = 0, sum = 0;  // where finite > 0

  void Add(const Statistics& other);
  // REQUIRES: finite > 0.
  double Mean() const;
};

// Of `count` elements at `from`, which needs no alignment. Thread-safe.
// REQUIRES: the dtype is not of NumberKind::kNone.
Statistics StatisticsOf(Dtype dtype, const std::byte* from, size_t count);

}  // namespace torch_ckpt
