// What the coordinator does for final files: what the ranks could not write
// there.
#pragma once

#include <string>
#include <vector>

#include "engine/commit/commit.h"
#include "engine/save/final_files.h"
#include "engine/save/write_job.h"

namespace torch_ckpt {

// What one rank reports.
struct RankFinals {
  int64_t rank = 0;
  std::vector<WrittenFinal> files;
  std::vector<WrittenSpill> spills;
};

// Puts the spills of all ranks in place and proves that every byte of every
// file was written once; the boxes of gathered tensors must tile them. The
// spills are compared with their digests. Memory: as a merge. Errors name the
// final file or the spill, and the tensor: kConflict where ranks have written
// by different headers, which names the rank, or have written the same bytes,
// kIncomplete where nobody has written some. Returns the files for the commit.
Result<std::vector<StagedFile>> RunAssembleJob(
    const Directory& staging, const FinalFiles& files,
    const std::vector<RankFinals>& ranks, const OutputOptions& options,
    Job* job);

}  // namespace torch_ckpt
