// Which rank writes what of the boxes that several ranks hold alike.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

struct SharedBox {
  uint32_t holders = 0;  // a position in ShareProblem::sets
  uint32_t tensor = 0;   // a number of its tensor
  // Whether those of its tensor are to stay on few nodes.
  bool near = false;
  // Steps along its outermost axis, between which it may be cut; 1 for a box
  // that stays whole. Not 0.
  uint64_t rows = 1;
  uint64_t row_bytes = 0;
};

struct ShareProblem {
  std::vector<uint32_t> nodes;              // by rank: of the machine it is on
  std::vector<std::vector<uint32_t>> sets;  // ranks, ascending; none is empty
  std::vector<SharedBox> boxes;
};

// The rows [begin, end) of a box, and who writes them.
struct BoxShare {
  uint32_t box = 0;
  uint32_t rank = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The shares of all boxes, by box and row, each with a rank that holds the box.
// Boxes of the fewest holders come first, of these the largest, and each goes
// to the holder that has the least to write so far, the lowest rank of several:
// of a node that has a box of its tensor already, where these are to stay near.
// A box is cut where that holder would come to more than an equal share of what
// its holders write by more than 1 MiB and 1/64.
//
// Takes boxes x holders. kInvalidArgument for a number that there is not.
Result<std::vector<BoxShare>> ShareOut(const ShareProblem& problem);

}  // namespace torch_ckpt
