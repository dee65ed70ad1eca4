#include "plan/join.h"

#include <algorithm>

#include "plan/cover.h"

namespace torch_ckpt {

std::optional<Box> JoinBoxes(const std::vector<Box>& boxes) {
  if (boxes.empty()) return std::nullopt;
  Box hull = boxes[0];
  int64_t elements = 0;  // may be more than the hull has: boxes may overlap
  const int64_t most = INT64_MAX / 2;
  for (const Box& box : boxes) {
    if (box.offsets.size() != hull.offsets.size()) return std::nullopt;
    for (int d = 0; d < hull.offsets.size(); ++d) {
      const int64_t end = std::max(hull.offsets[d] + hull.sizes[d],
                                   box.offsets[d] + box.sizes[d]);
      hull.offsets[d] = std::min(hull.offsets[d], box.offsets[d]);
      hull.sizes[d] = end - hull.offsets[d];
    }
    elements = std::min(most, elements + std::min(most, box.sizes.Product()));
  }
  // Mostly this says already that they do not.
  if (elements != hull.sizes.Product()) return std::nullopt;
  return ProveTiling(hull, boxes).ok() ? std::optional(hull) : std::nullopt;
}

}  // namespace torch_ckpt
