// Proof that boxes tile a region: no hole, no overlap.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "base/box.h"
#include "base/budget.h"
#include "base/status.h"

namespace torch_ckpt {

// Ok when the boxes lie inside `region`, do not overlap and cover all of it.
// kIncomplete names one missing box, kConflict two overlapping ones (with
// their positions in `boxes`), kInvalidArgument a box of another rank or one
// that reaches outside. Empty boxes are ignored. About n log n for the grids
// that sharding makes; never quadratic on one-dimensional cuts. The volume of
// `region` fits in int64 unless it is empty; any numbers do for the boxes,
// sizes below 0 included (they count as empty). kExhausted when they interlock
// in so many ways that the proof would take more than `budget` has;
// without one, more than belongs to so many boxes. Both proofs do so.
Status ProveTiling(const Box& region, const std::vector<Box>& boxes,
                   Budget* budget = nullptr);

// kConflict naming a pair that overlaps, or ok.
Status ProveDisjoint(const std::vector<Box>& boxes, Budget* budget = nullptr);

// The positions of such a pair, for callers that name boxes in their own words;
// nullopt where there is none. The other errors of ProveDisjoint.
Result<std::optional<std::pair<size_t, size_t>>> FindOverlap(
    const std::vector<Box>& boxes);

}  // namespace torch_ckpt
