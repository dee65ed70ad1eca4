// From the headers of data files to a proved catalog.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/open/header_io.h"
#include "format/ours/catalog_builder.h"

namespace torch_ckpt {

struct NamedHeader {
  std::string name;  // final basename
  FileHeader file;
  uint32_t position = 0;  // among the files of the checkpoint
};

enum class BoxProof {
  kTiling,    // the boxes of every tensor are all of it
  kDisjoint,  // no two overlap; files elsewhere hold the rest
};

// Adds the tensors of all files. The global shape of a tensor is what files of
// ours say; in files that do not say it, the hull of the boxes (so that a
// missing tail cannot be seen there: docs/format.md); the names of such tensors
// are added to `hulls`, where that is given. Then proves `proof`.
// Errors: kConflict for shards that disagree in dtype or shape or overlap,
// kIncomplete for a hole; both name tensor and file. Files whose tensors are
// listed twice are the usual cause of kConflict: shards of an earlier save
// beside newer ones.
Result<CatalogBuilder> BuildCatalog(const std::vector<NamedHeader>& files,
                                    BoxProof proof = BoxProof::kTiling,
                                    std::vector<std::string>* hulls = nullptr);

// Ok when the owners among the placements of a tensor of `shape` tile it. Else
// as ProveTiling.
Status ProveOwners(const Dims& shape, std::span<const Placement> placements);

}  // namespace torch_ckpt
