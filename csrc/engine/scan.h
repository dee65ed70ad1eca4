// Directories that are not ours: stock shards, stock consolidated files, Hub
// downloads. Read by index and headers.
#pragma once

#include <string>
#include <vector>

#include "format/catalog.h"
#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

struct ScanResult {
  std::vector<ManifestFile> files;  // without digests
  Catalog catalog;                  // of these
  bool by_index = false;
  // Tensors whose shape no file says: what the shards that are there make up.
  std::vector<std::string> hulls;
};

// An index whose files are all there wins; it must name every tensor of theirs,
// and shards that stand beside it must hold the same tensors (kConflict).
// Without one, every .safetensors file of the directory counts, and of files
// that are called "-of-N" all N must be there (kIncomplete). Reads headers with
// a few threads.
Result<ScanResult> ScanDirectory(const Directory& directory);

}  // namespace torch_ckpt
