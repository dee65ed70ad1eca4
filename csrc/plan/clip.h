// Cutting runs to a window of the source.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/runs.h"

namespace torch_ckpt {

// Appends the parts of `run` whose source bytes lie in [lo, hi). Slices of the
// run may overlap (unfolded tensors) and repeat (a src_stride of 0: expanded
// ones): each byte that the run copies from there is in exactly one part. Where
// they do neither, as in runs from dense boxes, the parts ascend by source, and
// are at most 2 * loops + 1; else an edge of the window makes one or more of
// each slice that it cuts.
void ClipRun(const Run& run, uint64_t lo, uint64_t hi, std::vector<Run>* out);

}  // namespace torch_ckpt
