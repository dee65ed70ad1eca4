// What ranks have left in a staging directory: proving it, and adding to it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/commit/commit.h"
#include "engine/open/build_catalog.h"

namespace torch_ckpt {

// Opens every file that `request` names: size, header and file id must be what
// its rank said. Then builds the catalog of all tensors and objects, for the
// files in the order of the request, with `proof` for the boxes. kCorrupt,
// kIncomplete and kConflict name the file.
Result<CatalogBuilder> CatalogOfStaged(const Directory& staging,
                                       const CommitRequest& request,
                                       BoxProof proof);

// Writes the catalog of `files` into staging, durably. kInvalidArgument, naming
// what can, when readers would not take it: after the commit that would be too
// late.
Result<StagedFile> AddStagedCatalog(const Directory& staging,
                                    std::string_view name,
                                    const CatalogBuilder& catalog,
                                    const std::vector<StagedFile>& files);

// Writes a small file of the commit itself into staging, durably.
Result<StagedFile> AddStagedFile(const Directory& staging,
                                 std::string_view name, FileRole role,
                                 const std::string& text);

// Copies files from anywhere into staging, durably, as extras of the checkpoint
// under their own names in `subdirectory` (empty: in the checkpoint's own
// directory), and adds them to the request. kInvalidArgument where
// that is a name of ours, or of a file of tensors or an index of such: what a
// directory holds beside them is for readers that take every such file for
// data.
Status AddStagedExtras(const Directory& staging,
                       const std::vector<std::string>& paths,
                       const std::string& subdirectory, CommitRequest* request);

}  // namespace torch_ckpt
