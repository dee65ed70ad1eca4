// The formats that are not ours, each as a reader of its directories into a
// catalog. A new format is one more reader, and a line in catalog_reader.cc.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/catalog.h"
#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// What a directory holds that is not ours.
struct ForeignCatalog {
  std::vector<ManifestFile> files;  // without digests
  Catalog catalog;                  // of these
  std::string_view source;          // how its files are known, in a word
  // Tensors whose shape no file says: what the shards that are there make up.
  std::vector<std::string> hulls;
  // Data files that are no part of the checkpoint: neither opened nor read.
  std::vector<std::string> beside;
  std::vector<FileInfo> infos;  // of `files`, before anything was read of them
  // Of the names, sizes and times of the files that are: who sees another one
  // sees other files.
  std::string identity;
};

struct CatalogReader {
  // Whether a directory with these names, sorted, is of this format. Looks at
  // names alone.
  bool (*recognise)(std::span<const std::string> names);
  Result<ForeignCatalog> (*read)(const Directory& directory);
};

// By the first reader that recognises it. kIncomplete where none does.
Result<ForeignCatalog> ReadForeign(const Directory& directory);

// Of files that were looked at: ForeignCatalog::identity.
std::string IdentityOf(std::span<const ManifestFile> files,
                       std::span<const FileInfo> infos);

}  // namespace torch_ckpt
