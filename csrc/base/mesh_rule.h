// A device mesh and one placement for each of its dimensions, the way
// torch.distributed.tensor says where the parts of a DTensor are.
#pragma once

#include <cstdint>
#include <vector>

#include "base/box.h"

namespace torch_ckpt {

enum class MeshPlacementKind : uint8_t { kReplicate, kShard, kStridedShard };

struct MeshPlacement {
  MeshPlacementKind kind = MeshPlacementKind::kReplicate;
  int dim = 0;               // tensor dimension, for the two shard kinds
  int64_t split_factor = 1;  // _StridedShard only
};

struct MeshRule {
  Dims mesh;                              // sizes of the mesh dimensions
  std::vector<MeshPlacement> placements;  // one per mesh dimension
};

}  // namespace torch_ckpt
