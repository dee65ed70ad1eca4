// What Python holds by number: opened checkpoints, and saves that go on. Jobs
// are in runtime/jobs.h.
#pragma once

#include <memory>

#include "engine/commit/rank_parts.h"
#include "engine/commit/staging.h"
#include "engine/open/checkpoint.h"
#include "json/fields.h"
#include "runtime/handles.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// One look at a directory serves describe, every wave of a load, verify, and
// all shares of a merge.
HandleTable<std::shared_ptr<const Checkpoint>>& Checkpoints();

// Files of these that stay open between jobs.
HandleTable<std::shared_ptr<OpenFiles>>& HeldFiles();

// A save that is being committed is out of the table meanwhile. One that is
// alive at exit keeps its staging directory for the next one to remove, as
// after a kill: tables are never destroyed.
HandleTable<std::unique_ptr<SaveSession>>& Saves();

// The parts of saves without collectives.
HandleTable<std::unique_ptr<PartSession>>& Parts();

// The one whose id stands in "checkpoint"; without that, the directory "path"
// is opened.
Result<std::shared_ptr<const Checkpoint>> CheckpointOf(const Json& object);

// The one whose id stands in "job", or a private one.
Result<std::shared_ptr<Job>> JobOf(const Json& object);

}  // namespace torch_ckpt
