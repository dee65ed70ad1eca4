// Steps of a commit that are one or two calls for each file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/status.h"
#include "runtime/workers.h"

namespace torch_ckpt {

// For steps that read, and need the CPU as well.
inline constexpr size_t kSeveral = 4;

// Does `step` for each of `count` files: many at once where there are many,
// since they wait for the server of a network file system, a millisecond each.
// `least` at once where there are as many; 1 does few in order, by the calling
// thread. Returns the first error, when none is going on any more.
inline Status ForEachFile(size_t count,
                          const std::function<Status(size_t)>& step,
                          size_t least = 1) {
  constexpr size_t kMostAtOnce = 32, kFilesOfOne = 16;
  const size_t workers =
      std::clamp<size_t>(count / kFilesOfOne, least, kMostAtOnce);
  return ForEachItem(
      static_cast<int>(workers), static_cast<int64_t>(count), nullptr,
      [&](int64_t i, int) { return step(static_cast<size_t>(i)); });
}

// The same as a Directory::ForEach.
inline Status ForEachOf(size_t count,
                        const std::function<Status(size_t)>& step) {
  return ForEachFile(count, step);
}

}  // namespace torch_ckpt
