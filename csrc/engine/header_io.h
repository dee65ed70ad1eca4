// Reading the header of a data file from disk.
#pragma once

#include "format/safetensors.h"
#include "format/sharding_info.h"
#include "os/file.h"

namespace torch_ckpt {

struct FileHeader {
  SafetensorsHeader header;
  ShardingInfo sharding;
};

// Parses and checks the header of an open .safetensors file. Memory: twice the
// header. Errors name the file. Thread-safe.
Result<FileHeader> ReadFileHeader(const File& file);

}  // namespace torch_ckpt
