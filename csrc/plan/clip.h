// Cutting runs to a window of the source.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/runs.h"

namespace torch_ckpt {

// Appends the parts of `run` whose source bytes lie in [lo, hi), in ascending
// source order; at most 2 * loops + 1 of them. REQUIRES a monotone source:
// every src_stride is at least the source span of the loops inside it, as it
// is for every run that MakeRun makes from a dense box.
void ClipRun(const Run& run, uint64_t lo, uint64_t hi, std::vector<Run>* out);

}  // namespace torch_ckpt
