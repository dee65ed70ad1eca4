// What a rank has of a tensor in several boxes, put together to one.
#pragma once

#include <optional>
#include <vector>

#include "base/box.h"

namespace torch_ckpt {

// The box that `boxes`, none of which is empty, tile; nullopt where they leave
// a hole or overlap. REQUIRES: all are inside one tensor, whose size fits in
// int64.
std::optional<Box> JoinBoxes(const std::vector<Box>& boxes);

}  // namespace torch_ckpt
