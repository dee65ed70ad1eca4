// The write job: tensors of this rank's memory into files in staging.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/output_files.h"
#include "engine/source_bytes.h"
#include "format/sharding_info.h"

namespace torch_ckpt {

struct WriteTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Dims shape;    // of this box, in elements of dtype
  Dims offsets;  // in the global tensor
  Dims global_shape;
  size_t source = 0;  // index into the sources
};

struct WriteFile {
  std::string name;
  FileRole role = FileRole::kData;
  bool sharded = false;              // sharding keys in the header
  std::vector<WriteTensor> tensors;  // kData
  std::vector<size_t> raw;  // any other role: these sources, one after another
};

struct WritePlan {
  std::string staging;  // directory
  std::vector<WriteFile> files;
  OutputOptions options;
};

struct WrittenFile {
  OutputSpec spec;
  std::vector<uint32_t> crc32c;
};

// Blocks until every file is written and synced (and its short header beside
// it, engine/header_io.h), or fails and has unlinked them. Checks that sources
// match shapes and dtypes. Errors name file and tensor. Progress and
// cancellation through `job`. Device memory is copied piece by piece, each
// worker into its own buffer of the arena, so that one copies while another
// writes; kUnsupported where CUDA's driver is not usable.
Result<std::vector<WrittenFile>> RunWriteJob(
    WritePlan plan, const std::vector<SourceTensor>& sources, Job* job);

}  // namespace torch_ckpt
