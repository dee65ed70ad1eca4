// Placements by rule: a device mesh and one placement per mesh dimension, the
// way torch.distributed.tensor describes a DTensor, expanded to true boxes.
#pragma once

#include <vector>

#include "base/box.h"
#include "base/budget.h"
#include "base/mesh_rule.h"
#include "base/status.h"

namespace torch_ckpt {

// The boxes of a tensor of `shape` that the rank at `coordinate` holds, in the
// order in which their elements stand in the local tensor along each dimension
// (a box's place in local memory is `local_offset`). Adjacent boxes are merged.
// Uneven sizes split as torch.chunk does: ceil(n / k) rows, trailing ranks
// short or empty. kInvalidArgument for a rule that torch would refuse (negative
// dimensions included: torch counts them from the front before it gets here),
// kExhausted for one that cuts dimensions into more pieces, or makes more
// boxes, than `budget` has: a strided shard may have one box for each element,
// and rules are read from disk.
struct LocalBox {
  Box box;
  Dims local_offset;  // element offsets in the local tensor
};
Result<std::vector<LocalBox>> ExpandRule(const Dims& shape,
                                         const MeshRule& rule,
                                         const Dims& coordinate,
                                         Budget* budget);

}  // namespace torch_ckpt
