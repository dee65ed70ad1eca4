// The merge job: a checkpoint's tensors, whole, into final files.
//
// The output is streamed: a piece of an output file is gathered from the input
// files, digested and written. Memory: two pieces a worker, three with casts.
// The bytes that are read are compared with their digests before the job is
// done.
#pragma once

#include <vector>

#include "engine/merge/merge_plan.h"

namespace torch_ckpt {

// Writes the plan's files into staging, or a part of them that are there: see
// OutputSpec::ranges and WriteOutputs. `outputs` are those of the plan, and
// what to write of each. kCorrupt names an input file whose bytes do not match.
Result<std::vector<std::vector<WrittenRange>>> RunMergeJob(
    const MergePlan& plan, const Directory& staging,
    const std::vector<Output>& outputs, Job* job);

}  // namespace torch_ckpt
