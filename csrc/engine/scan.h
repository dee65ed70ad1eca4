// Directories that are not ours: stock shards, stock consolidated files, Hub
// downloads. Read by index and headers.
#pragma once

#include "format/catalog.h"
#include "os/directory.h"

namespace torch_ckpt {

struct ScanResult {
  Catalog catalog;
  bool by_index = false;
};

// An index whose files are all there wins; shards that stand beside it must
// then hold the same tensors (kConflict). Without one, every .safetensors file
// of the directory counts. Reads headers with a few threads.
Result<ScanResult> ScanDirectory(const Directory& directory);

}  // namespace torch_ckpt
