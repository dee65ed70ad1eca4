// A placement of a catalog: the boxes that it is, and the source of runs.
#pragma once

#include <vector>

#include "format/ours/catalog.h"
#include "plan/ranges.h"
#include "plan/runs.h"

namespace torch_ckpt {

// The boxes of a tensor of `shape` that a placement holds, in elements: one, or
// those of a range.
inline std::vector<Box> BoxesOf(const Placement& placement, const Dims& shape) {
  if (placement.kind != PlacementKind::kRange) return {placement.box};
  return BoxesOfRange(shape, placement.begin, placement.end);
}

// The same in units (format/dtype.h), each with the file offset of its first
// byte and the bytes from one unit to the next.
inline Result<std::vector<StridedBox>> StoredBoxes(Dtype dtype,
                                                   const Dims& shape,
                                                   const Placement& placement) {
  if (placement.kind != PlacementKind::kRange) {
    TC_ASSIGN_OR_RETURN(const UnitView view,
                        InUnits(dtype, shape, placement.box));
    return std::vector<StridedBox>{
        {view.box, placement.offset,
         placement.kind == PlacementKind::kStridedBox
             ? placement.strides
             : DenseStrides(view.box.sizes, view.unit_bytes)}};
  }
  TC_ASSIGN_OR_RETURN(const UnitView whole,
                      InUnits(dtype, shape, Box::Whole(shape)));
  const int64_t unit = DtypeUnit(dtype).elements;
  // Part of a row-major tensor is row-major: the tensor's strides, and the
  // first byte of the range stands where the placement begins.
  const Dims strides = DenseStrides(whole.shape, whole.unit_bytes);
  std::vector<StridedBox> boxes;
  for (Box& box : BoxesOfRange(whole.shape, placement.begin / unit,
                               placement.end / unit)) {
    int64_t first = -placement.begin / unit * whole.unit_bytes;
    for (int d = 0; d < box.rank(); ++d) first += box.offsets[d] * strides[d];
    boxes.push_back({std::move(box),
                     placement.offset + static_cast<uint64_t>(first), strides});
  }
  return boxes;
}

}  // namespace torch_ckpt
