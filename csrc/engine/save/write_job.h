// The write job: tensors of this rank's memory into files in staging.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/save/final_write.h"
#include "engine/write/output_files.h"
#include "engine/write/source_tensor.h"

namespace torch_ckpt {

struct WriteFile {
  std::string name;  // below the checkpoint's directory (CheckFilePath)
  FileRole role = FileRole::kData;
  std::vector<WriteTensor> tensors;  // kData: shards
  std::vector<size_t> raw;  // any other role: these sources, one after another
};

struct WritePlan {
  std::string staging;  // directory; kConflict where it is gone
  std::vector<WriteFile> files;
  std::vector<WriteTensor> final_tensors;  // into files in staging
  int64_t rank = 0;  // this one, as the list of final files counts them
  bool join = true;  // boxes to one; see LayOutData
  OutputOptions options;
};

// What this rank has written of a final file, be it nothing.
struct WrittenFinal {
  uint32_t file = 0;  // in the list of final files
  std::string id;     // in the header that this rank has read
  std::vector<WrittenRange> ranges;
};

// What it has left for the coordinator to put in place.
struct WrittenSpill {
  StagedFile file;
  std::vector<SpillBytes> bytes;
  std::vector<SpillBox> boxes;
};

struct WrittenPlan {
  std::vector<StagedFile> files;
  std::vector<WrittenFinal> final_files;
  std::optional<WrittenSpill> spill;
  uint64_t ring_bytes = 0;  // what this rank has had of tensors of a ring
};

// Blocks until every file is written and synced (and its short header beside
// it, engine/open/header_io.h), or fails and has unlinked those that it has
// made. Checks that sources match shapes and dtypes, and that casts lose no
// value (engine/write/casts.h). Errors name file and tensor. Progress and
// cancellation through `job`. Device memory is copied piece by piece, each
// worker into its own buffer of the arena, so that one copies while another
// writes; kUnsupported where CUDA's driver is not usable.
Result<WrittenPlan> RunWriteJob(WritePlan plan,
                                const std::vector<SourceTensor>& sources,
                                Job* job);

}  // namespace torch_ckpt
