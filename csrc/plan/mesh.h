// Placements by rule: a device mesh and one placement per mesh dimension, the
// way torch.distributed.tensor describes a DTensor, expanded to true boxes.
#pragma once

#include <vector>

#include "base/box.h"
#include "base/mesh_rule.h"
#include "base/status.h"

namespace torch_ckpt {

// A strided shard may have one box per element, and rules are read from disk:
// no rank of a sane layout comes near this.
inline constexpr size_t kMaxBoxesPerRank = size_t{1} << 20;

// The boxes of a tensor of `shape` that the rank at `coordinate` holds, in the
// order in which their elements stand in the local tensor along each dimension
// (a box's place in local memory is `local_offset`). Adjacent boxes are merged.
// Uneven sizes split as torch.chunk does: ceil(n / k) rows, trailing ranks
// short or empty. kInvalidArgument for a rule that torch would refuse (negative
// dimensions included: torch counts them from the front before it gets here),
// kExhausted for one that makes more than `most` boxes on a rank, or that cuts
// a dimension into more pieces.
struct LocalBox {
  Box box;
  Dims local_offset;  // element offsets in the local tensor
};
Result<std::vector<LocalBox>> ExpandRule(const Dims& shape,
                                         const MeshRule& rule,
                                         const Dims& coordinate,
                                         size_t most = kMaxBoxesPerRank);

}  // namespace torch_ckpt
