// Row-major ranges of a tensor as boxes: the flat shards of FSDP1 and ZeRO-1,
// and the byte ranges that a consolidation hands out.
#pragma once

#include <vector>

#include "base/box.h"

namespace torch_ckpt {

// Elements [begin, end) of a tensor of `shape`, in row-major order, as at most
// 2n - 1 boxes in ascending order. REQUIRES 0 <= begin <= end <= Product().
std::vector<Box> BoxesOfRange(const Dims& shape, int64_t begin, int64_t end);

// Cuts [0, total) into `parts` contiguous ranges that differ by at most one
// `grain` and start at multiples of it. Returns parts + 1 boundaries.
// REQUIRES parts > 0 and grain > 0.
std::vector<uint64_t> BalancedCuts(uint64_t total, int parts, uint64_t grain);

}  // namespace torch_ckpt
