// Which rank writes each of the boxes that several ranks hold alike.
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
  uint64_t bytes = 0;
};

struct ShareProblem {
  std::vector<uint32_t> nodes;              // by rank: of the machine it is on
  std::vector<std::vector<uint32_t>> sets;  // ranks, ascending; none is empty
  std::vector<SharedBox> boxes;
};

// The rank of each box: one that holds it. Boxes of the fewest holders come
// first, of these the largest, and each goes to the holder that has the least
// to write so far, the lowest rank of several: of a node that has a box of its
// tensor already, where these are to stay near. Takes boxes x holders.
// kInvalidArgument for a number that there is not.
Result<std::vector<uint32_t>> ShareOut(const ShareProblem& problem);

}  // namespace torch_ckpt
