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
// Of names that no reader recognises: why the index among them leads to none,
// as it is no index, or its files are missing. Ok where there is none.
Status CheckIndexAlone(const Directory& directory,
                       std::span<const std::string> names);

// model.safetensors.index.json, or the only index there is, wins where its
// files are all there; they may stand below the directory. What counts is what
// they hold: names that the index lacks are read too, and those that no file
// has are a note. Beside an index the single file that transformers takes
// before it is read, and a note says so. Shards ("shard-*") that stand beside
// what is read, and the files of the index beside the single one, must hold the
// same tensors (kConflict), of which not the values are compared; where files
// of the index are missing, single file or shards make up for them only when
// they hold all that it names. Any
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
