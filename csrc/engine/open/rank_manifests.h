// Reading the parts of a save without collectives (engine/commit/rank_parts.h)
// as one checkpoint.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "format/ours/catalog_builder.h"
#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// The part manifest `name`. kCorrupt where it does not fit its name.
Result<Manifest> ReadPart(const Directory& directory, const std::string& name);

// Every part manifest that stands in `directory`, by rank; none when there is
// none. kCorrupt for one that does not fit its name.
Result<std::vector<Manifest>> ReadParts(const Directory& directory);

// Whether a rank has begun a part here that is neither committed nor undone.
Result<bool> HasPartStaging(const Directory& directory);

// The rest takes what ReadParts gave. REQUIRES: at least one part.

// Ok when these are all parts of one save. kConflict for parts of different
// saves, kIncomplete naming the ranks whose part is missing.
Status CheckParts(const std::vector<Manifest>& parts);

// Changes whenever a part is replaced; an id like any save id.
std::string PartsSaveId(const std::vector<Manifest>& parts);

// The files of all parts under one save id. Several are catalogs.
Result<Manifest> MergeManifests(const std::vector<Manifest>& parts);

// A catalog of one rank, made for its own files.
struct CatalogPart {
  Catalog catalog;
  std::span<const ManifestFile> files;
};

// One catalog of those of all parts, in the order of ranks, for the files of
// all of them one after another. Ranks that hold the same box have both written
// it: the lowest one's is the owner, the others are replicas. The owners of
// every tensor are then proved to tile it. kConflict for parts that disagree
// about a tensor, kIncomplete for a hole; both name it.
Result<CatalogBuilder> MergeCatalogs(const std::vector<CatalogPart>& parts);

}  // namespace torch_ckpt
