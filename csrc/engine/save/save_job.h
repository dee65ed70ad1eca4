// The save job: a checkpoint of this process alone, from memory to the commit.
#pragma once

#include <string>
#include <vector>

#include "engine/save/write_job.h"
#include "format/names.h"
#include "plan/divide.h"

namespace torch_ckpt {

struct SavePlan {
  std::string path;       // directory of the checkpoint
  bool overwrite = true;  // else kConflict where it holds a checkpoint
  // Whole tensors, each name once.
  std::vector<WriteTensor> tensors;
  FileRule rule;
  FileNaming naming;
  OutputOptions options;
};

struct SavedCheckpoint {
  Manifest manifest;
  std::vector<std::string> warnings;  // as SaveSession::TakeWarnings
};

// Waits for the kernels that are queued on the tensors' devices. Blocks until
// the final files are written and committed: the checkpoint is
// there, whole and, where options.sync is set, durable. After an error what was
// there before still is, and nothing is left in staging. Errors are those of
// BeginSave, StageFinalFiles, RunWriteJob and CommitSave; a name that is there
// twice is kInvalidArgument. Progress and cancellation through `job`.
Result<SavedCheckpoint> RunSaveJob(SavePlan plan,
                                   const std::vector<SourceTensor>& sources,
                                   Job* job);

}  // namespace torch_ckpt
