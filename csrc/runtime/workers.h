// Worker threads that are always joined and never let an exception out.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// Calls fn(item, worker) for every item in [0, items), in ascending order of
// starting, on `workers` threads (the calling one included; worker counts from
// 0). Stops handing out items after the first error or when `job` (may be
// null) is cancelled (kCancelled). Returns the first error; std::bad_alloc
// becomes kExhausted, any other exception kInternal. Returns only when no fn
// runs any more.
Status ForEachItem(int workers, int64_t items, Job* job,
                   const std::function<Status(int64_t item, int worker)>& fn);

}  // namespace torch_ckpt
