// Directories of Megatron Core's dist_checkpointing, its format torch_dist:
// those of stock DCP, with metadata.json, and a common state that all ranks
// have.
#pragma once

#include <span>
#include <string>

#include "engine/open/catalog_reader.h"

namespace torch_ckpt {

// Whether there is a .metadata, and metadata.json names a backend of Megatron,
// which writes it last. `names` are sorted.
Result<bool> IsMegatron(const Directory& directory,
                        std::span<const std::string> names);

// As ReadDcp; and the leaves of the common state, which is common.pt or the
// object common_state/shard_0_1, beside the tensors, under their own names.
// kUnsupported for other backends, such as zarr.
Result<ForeignCatalog> ReadMegatron(const Directory& directory,
                                    std::span<const std::string> names,
                                    bool is_file);

}  // namespace torch_ckpt
