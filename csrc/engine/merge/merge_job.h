// A merge, from the place it goes to until its commit: by one process, or by
// ranks of which one begins and commits, and each writes a share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/commit/staging.h"
#include "engine/merge/merge_plan.h"
#include "format/ours/manifest.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// Where the output goes.
struct MergeTarget {
  std::string path;
  bool overwrite = false;
  bool others = false;  // see BeginSave
  // Of a merge into the input's own directory: the output takes the place of
  // the input, of which nothing stays but its extras.
  bool replaces = false;
  // Paths of files that are to stand beside the tensors.
  std::vector<std::string> extras{};
};

struct BegunMerge {
  std::unique_ptr<SaveSession> session;
  bool in_place = false;  // the output goes into the input's own directory
  bool replaces = false;  // MergeTarget's
};

// Begins the save of the output. kConflict, naming it, for what stands where
// the merge would write, unless that may be overwritten; kInvalidArgument for a
// part of a checkpoint that would take the place of all of it, where nobody has
// said `replaces`.
Result<BegunMerge> BeginMerge(const MergePlan& plan, const MergeTarget& target);

// Writes the plan's files into staging, or a part of them that are there: see
// Output::ranges and WriteOutputs. `outputs` are those of the plan, and
// what to write of each. They are streamed: a piece of an output file is
// gathered from the input files, digested and written, with two pieces of
// memory a worker, three with casts. The bytes that are read are compared with
// their digests before this returns; kCorrupt names an input file whose bytes
// do not match, kInvalidArgument a tensor of which a cast has lost a value.
Result<std::vector<std::vector<WrittenRange>>> RunMergeJob(
    const MergePlan& plan, const Directory& staging,
    const std::vector<Output>& outputs, Job* job);

// Commits what was written of each output of the plan, by all ranks, with the
// extras of its target. See CommitSave of what becomes of the session. In place
// these files of the input's manifest stay: shards (as with stock), what is no
// tensor, and what holds tensors that the output lacks.
Result<Manifest> CommitMerge(const MergePlan& plan, BegunMerge* merge,
                             const std::vector<std::string>& extras,
                             std::vector<std::vector<WrittenRange>> written);

}  // namespace torch_ckpt
