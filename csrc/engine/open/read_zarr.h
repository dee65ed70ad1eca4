// The tree of directories of Megatron Core's backend zarr (to 0.15): one for
// each tensor, called by its key, with .zarray and a file for each chunk; and
// archives of torch.save for objects, key/shard_<offset>_<shape>.pt.
#pragma once

#include "engine/open/catalog_reader.h"
#include "format/ours/catalog_builder.h"

namespace torch_ckpt {

// Adds the tensors and objects in `directory` to `catalog`, and their files to
// `found`. Looks at the size of each file, and opens none but .zarray. Links
// are not followed, and directories that hold neither are left out.
//
// kCorrupt or kUnsupported for a .zarray that says something else than plain
// chunks, kIncomplete for a chunk that is missing or too short and for chunks
// without .zarray, kCorrupt for a chunk that is too long or that the tensor
// does not have; each names the file. kCorrupt for a directory whose name
// cannot be a part of a key. kUnsupported for a link that a tensor may be
// behind, and for a .zarray or an object below a name that begins with a dot or
// ends in .sync, as the locks of zarr do.
Status ReadZarrTree(const Directory& directory, ForeignCatalog* found,
                    CatalogBuilder* catalog);

}  // namespace torch_ckpt
