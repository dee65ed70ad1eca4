// Boxes of one tensor as boxes of another one that has the same elements in
// other places: in an interval, in every n-th index, without a dimension, with
// dimensions in another order.
#pragma once

#include <cstdint>
#include <vector>

#include "base/box.h"
#include "plan/runs.h"

namespace torch_ckpt {

// What a view takes of a tensor: of some of its dimensions `count` indices,
// `step` apart, and of the others one.
struct Selection {
  struct Axis {
    int dim = 0;  // of the tensor
    int64_t start = 0, step = 1, count = 0;
  };
  std::vector<Axis> axes;  // the dimensions of the view, in its order
  Dims at;                 // of the tensor's dimensions that are no axis

  bool operator==(const Selection&) const;
};

// The boxes that it takes of a tensor: one, or one for each index of an axis
// with steps.
std::vector<Box> BoxesOf(const Selection& selection);

// Element i of the one view is element i of the other. REQUIRES: both have axes
// of the same counts.
struct SelectionPair {
  Selection from, to;
};

// Appends what of `box`, of the tensor of `from`, the pair has, as boxes of the
// tensor of `to` with the same bytes. Where `to` has steps these are as many
// boxes as indices.
void MapBox(const SelectionPair& pair, const StridedBox& box,
            std::vector<StridedBox>* out);

}  // namespace torch_ckpt
