// Opened checkpoints that Python holds by number: one look at a directory
// serves describe, every wave of a load, verify, and all parts of a merge.
#pragma once

#include <memory>

#include "capi/requests.h"
#include "engine/open/checkpoint.h"
#include "runtime/handles.h"

namespace torch_ckpt::capi {

HandleTable<std::shared_ptr<const Checkpoint>>& Checkpoints();

// The one whose id stands in "checkpoint" of the request; without that, the
// directory "path" is opened.
Result<std::shared_ptr<const Checkpoint>> CheckpointOf(const Json& request);

}  // namespace torch_ckpt::capi
