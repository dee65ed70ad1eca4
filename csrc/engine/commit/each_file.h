// Steps of a commit that are one or two calls for each file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/status.h"
#include "runtime/workers.h"

namespace torch_ckpt {

// Does `step` for each of `count` files: many at once where there are many,
// since they wait for the server of a network file system, a millisecond each.
// Few are done in order by the calling thread. Returns the first error, when
// none is going on any more.
inline Status ForEachFile(size_t count,
                          const std::function<Status(size_t)>& step) {
  constexpr size_t kMostAtOnce = 32, kFilesOfOne = 16;
  const size_t workers =
      std::clamp<size_t>(count / kFilesOfOne, 1, kMostAtOnce);
  return ForEachItem(
      static_cast<int>(workers), static_cast<int64_t>(count), nullptr,
      [&](int64_t i, int) { return step(static_cast<size_t>(i)); });
}

}  // namespace torch_ckpt
