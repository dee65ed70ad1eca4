// Saves that Python holds by number. One that is being committed is out of the
// table meanwhile.
#pragma once

#include <memory>

#include "engine/commit/rank_parts.h"
#include "engine/commit/staging.h"
#include "runtime/handles.h"

namespace torch_ckpt::capi {

// A save that is alive at exit keeps its staging directory for the next one to
// remove, as after a kill: tables are never destroyed.
HandleTable<std::unique_ptr<SaveSession>>& Saves();

// The parts of saves without collectives.
HandleTable<std::unique_ptr<PartSession>>& Parts();

}  // namespace torch_ckpt::capi
