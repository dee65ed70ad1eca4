// Directories of stock DCP: .metadata beside .distcp files.
#pragma once

#include <span>
#include <string>

#include "engine/open/catalog_reader.h"

namespace torch_ckpt {

// `names` are sorted.
bool HasDcpMetadata(std::span<const std::string> names);
bool IsDcpFile(const std::string& name);

// Reads .metadata alone, and looks at the sizes of the files that it names:
// kIncomplete where one is missing or ends before what it is said to hold.
Result<ForeignCatalog> ReadDcp(const Directory& directory,
                               std::span<const std::string> names,
                               bool is_file);

}  // namespace torch_ckpt
