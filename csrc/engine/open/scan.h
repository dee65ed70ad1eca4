// Directories that are not ours: stock shards, stock consolidated files, Hub
// downloads. Read by index and headers.
#pragma once

#include <span>
#include <string>

#include "engine/open/catalog_reader.h"

namespace torch_ckpt {

// Whether any of the names, which are sorted, is that of a data file.
bool HasSafetensors(std::span<const std::string> names);
// The same, or an index names files below the directory that are there.
Result<bool> IsSafetensors(const Directory& directory,
                           std::span<const std::string> names);

// model.safetensors.index.json, or the only index there is, wins where its
// files are all there; they may stand below the directory. What counts is what
// they hold: names that the index lacks are read too, and those that no file
// has are a note. Shards ("shard-*")
// that stand beside it, and the single file that transformers would take before
// it, must hold the same tensors (kConflict); where files of the index are
// missing, these make up for them only when they hold all that it names. Any
// other file beside an index is not read. Without one, "model.safetensors" (or
// that of another stem) is read alone, as transformers does, and a note says
// what is beside it; two of these are kConflict. Else, and where shards stand
// beside it, every .safetensors file of the directory counts, but for variants
// ("model.fp16.safetensors" beside "model.safetensors"), and of files that are
// called "-of-N" all N must be there (kIncomplete). `names`, sorted, are those
// to look among. Reads headers with a few threads.
Result<ForeignCatalog> ReadSafetensors(const Directory& directory,
                                       std::span<const std::string> names,
                                       bool is_file);

}  // namespace torch_ckpt
