// Directories of stock DCP: .metadata beside .distcp files.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/open/catalog_reader.h"
#include "format/ours/catalog.h"
#include "format/ours/catalog_builder.h"

namespace torch_ckpt {

// `names` are sorted.
bool HasDcpMetadata(std::span<const std::string> names);
bool IsDcpFile(const std::string& name);

// Those of kStockMetadataNames by which a checkpoint of stock DCP is in
// `directory`; none where there is none. A text that begins with kPatchMark is
// not stock's: programs that look for the name find it beside a checkpoint of
// ours (torch_ckpt/patching/storage.py).
Result<std::vector<std::string>> FindStockMetadata(const Directory& directory);
inline constexpr std::string_view kPatchMark = "# torch_ckpt";

// What is known of a directory before its catalog is made.
struct DcpDirectory {
  ForeignCatalog found;  // with files and identity, without a catalog
  CatalogBuilder catalog;
  std::optional<TorchArchivePlace> apart;  // as of ParseDcpMetadata
};

// Reads .metadata alone, and looks at the sizes of the files that it names:
// kIncomplete where one is missing or ends before what it is said to hold.
Result<DcpDirectory> ReadDcpDirectory(const Directory& directory,
                                      std::string_view apart);
Result<ForeignCatalog> ReadDcp(const Directory& directory,
                               std::span<const std::string> names,
                               bool is_file);

}  // namespace torch_ckpt
