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
  // Data files that are no part of the checkpoint: neither opened nor read.
  std::vector<std::string> beside;
  std::vector<FileInfo> infos;  // of `files`, before their headers were read
  // Of the names, sizes and times of the files that are: who sees another one
  // sees other files.
  std::string identity;
};

// model.safetensors.index.json, or the only index there is, wins where its
// files are all there. It must name every tensor of theirs. Shards ("shard-*")
// that stand beside it, and the single file that transformers would take before
// it, must hold the same tensors (kConflict); where files of the index are
// missing, these make up for them only when they hold all that it names. Any
// other file beside an index is not read. Without one, every .safetensors file
// of the directory counts, but for variants ("model.fp16.safetensors" beside
// "model.safetensors"), and of files that are called "-of-N" all N must be
// there (kIncomplete). Reads headers with a few threads.
Result<ScanResult> ScanDirectory(const Directory& directory);

}  // namespace torch_ckpt
