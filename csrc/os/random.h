// Random bytes from the kernel.
#pragma once

#include "base/bytes.h"

namespace torch_ckpt {

// Fills `out`, which holds at most 256 bytes. Never fails and never waits once
// the machine is up: where the kernel has no such call (before Linux 3.17), the
// C++ library's source is used. May be called from any thread.
void FillRandom(MutableByteSpan out);

}  // namespace torch_ckpt
