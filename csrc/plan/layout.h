// Where tensors stand inside a data file.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "format/safetensors/safetensors.h"

namespace torch_ckpt {

// What the place of a tensor in its file depends on.
struct LayoutKey {
  uint64_t bytes = 0;
  int element_bits = 8;
  std::string_view name;
};

// The order of tensors in a file, as docs/format.md says: sizes that are
// multiples of 4096 first, then the rest by descending element size, each class
// by name; empty tensors last. result[i] is the input position of output i.
std::vector<uint32_t> FileOrder(const std::vector<LayoutKey>& keys);

// Puts `tensors` (begin/end ignored) into that order. Sets begin and end to
// tile the data area. Returns the permutation.
std::vector<uint32_t> LayOutFile(std::vector<SafetensorsEntry>* tensors);

}  // namespace torch_ckpt
