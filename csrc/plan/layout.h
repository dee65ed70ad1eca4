// Where tensors stand inside a data file.
#pragma once

#include <cstdint>
#include <vector>

#include "format/safetensors.h"

namespace torch_ckpt {

// Orders `tensors` (begin/end ignored) as docs/format.md says: sizes that are
// multiples of 4096 first, then the rest by descending element size, each
// class by name; empty tensors last. Sets begin and end to tile the data area.
// Returns the permutation: result[i] is the input position of output i.
std::vector<uint32_t> LayOutFile(std::vector<SafetensorsEntry>* tensors);

}  // namespace torch_ckpt
