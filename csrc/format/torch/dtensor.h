// What a pickle of torch.save says of a DTensor: the shape of the whole, and
// the part of it that the rank had which saved it.
#pragma once

#include "base/box.h"
#include "base/budget.h"
#include "base/mesh_rule.h"
#include "base/status.h"
#include "format/torch/tensor.h"

namespace torch_ckpt {

struct TorchDTensor {
  Dims shape;         // of the whole, in elements
  TorchTensor local;  // what of it is in the archive
  MeshRule rule;
  Dims coordinate;  // of the rank, in the mesh
};

// REQUIRES: IsTorchDTensor(rebuild). Reads what torch 2.2 to 2.13 write: the
// mesh as a tensor of ranks, or as a layout. kUnsupported for partial sums,
// packed elements, and where the pickle does not say which rank saved it;
// kCorrupt for what torch does not write. That the rule makes such a local part
// is for the caller to check. `budget`: of the pickle, of which many tensors
// may share the parts.
Result<TorchDTensor> ReadTorchDTensor(const TorchRebuild& rebuild,
                                      Budget* budget);

}  // namespace torch_ckpt
