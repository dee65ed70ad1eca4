// What stands under the name of a file of weights when a download went wrong.
#pragma once

#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt {

// Says what `file` is where it is empty, a pointer of Git LFS, or a page of
// HTML or text, by its first bytes: kIncomplete or kCorrupt, with its path. Ok
// for anything else, and where it cannot be read.
Status CheckNoStandIn(const File& file);

}  // namespace torch_ckpt
