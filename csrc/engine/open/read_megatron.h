// Directories of Megatron Core's dist_checkpointing, which have metadata.json
// and a common state that all ranks have: of its format torch_dist, those of
// stock DCP, and of zarr.
#pragma once

#include <span>
#include <string>

#include "engine/open/catalog_reader.h"

namespace torch_ckpt {

// Whether metadata.json, which Megatron writes last, names the backend zarr, or
// another one beside a .metadata. `names` are sorted.
Result<bool> IsMegatron(const Directory& directory,
                        std::span<const std::string> names);

// As ReadDcp or ReadZarrTree; and the leaves of the common state, which is
// common.pt or the object common_state/shard_0_1, beside the tensors, under
// their own names. kUnsupported for other backends.
Result<ForeignCatalog> ReadMegatron(const Directory& directory,
                                    std::span<const std::string> names,
                                    bool is_file);

}  // namespace torch_ckpt
