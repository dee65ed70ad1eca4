// Copying past the CPU's caches.
#pragma once

#include <cstddef>

#include "base/bytes.h"

namespace torch_ckpt {

// Copies `from` to `to`. Large copies bypass the caches where the CPU can: they
// spare the memory the reading of what is overwritten, and the trainer its
// cache. Visible to other threads when it returns. The ranges must not overlap.
void StreamCopy(std::byte* to, ByteSpan from);

}  // namespace torch_ckpt
