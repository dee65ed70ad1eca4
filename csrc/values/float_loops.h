// Elements of any float type to floats and back, for the vectors of this CPU.
// For the files of this room.
#pragma once

#include <cstddef>
#include <vector>

#include "format/dtype.h"

namespace torch_ckpt {

// What the loops take at most: so few that they stay in the first cache.
inline constexpr size_t kFloatsAtOnce = 1024;

// Null where there is none for a dtype.
struct FloatLoops {
  // Returns how many became infinite. Of F8_E8M0, which is a scale.
  size_t (*read)(const std::byte* source, float* out, size_t count) = nullptr;
  // Of codes of 4 and 8 bits: each times its scale. `block` elements have one,
  // of the first of which `into` are left out. Of F4, `count` is even.
  void (*read_scaled)(const std::byte* source, const float* scales, size_t into,
                      size_t block, float* out, size_t count) = nullptr;
  // Returns how many are too large.
  size_t (*write)(const float* values, std::byte* to, size_t count) = nullptr;
  bool has_infinity = true;
};

struct FloatImplementation {
  const char* name;
  FloatLoops (*loops)(Dtype);
};

// Those of this CPU, the best one first.
const std::vector<FloatImplementation>& FloatImplementations();

}  // namespace torch_ckpt
