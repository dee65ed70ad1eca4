// The formats that are not ours, each as a reader of its directories into a
// catalog. A new format is one more reader, and a line in catalog_reader.cc.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/ours/catalog.h"
#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// What a directory holds that is not ours.
struct ForeignCatalog {
  std::vector<ManifestFile> files;  // without digests
  Catalog catalog;                  // of these
  std::string_view format;          // of its reader
  std::string_view source;          // how its files are known, in a word
  // Tensors whose shape no file says: what the shards that are there make up.
  std::vector<std::string> hulls;
  // Those that hold state dicts, and the storages in them that tensors are in,
  // where their CRC-32s are known, sorted.
  std::vector<TorchArchivePlace> archives;
  std::vector<DigestedRange> storages;
  // Tensors that are not read, by name. To the catalog they may be objects.
  std::map<std::string, UnreadTensor, std::less<>> unread;
  // Leaves of a state that all ranks have alike, beside what is stored by keys:
  // Megatron's common state.
  std::set<std::string, std::less<>> common;
  // Objects that stand in no file, by their names: typed JSON. Their entries
  // are ArchivedObjects of no bytes.
  std::map<std::string, std::string, std::less<>> made_objects;
  // Data files that are no part of the checkpoint: neither opened nor read.
  std::vector<std::string> beside;
  // What is wrong and no error, which whoever reads it is told: sentences
  // without a subject, which is the path.
  std::vector<std::string> notes;
  std::vector<FileInfo> infos;  // of `files`, before anything was read of them
  // Of the names, sizes and times of the files that are: who sees another one
  // sees other files.
  std::string identity;

  // One more of `files` and `infos`.
  void AddFile(std::string name, const FileInfo& info);
};

// Both see `names`, sorted, of the directory: all of them, or, of a file that
// was asked for, its own.
struct CatalogReader {
  std::string_view format;  // as people call it
  // Whether they are of this format. Goes by names, and where other formats
  // have these too by a few bytes.
  Result<bool> (*recognise)(const Directory& directory,
                            std::span<const std::string> names);
  Result<ForeignCatalog> (*read)(const Directory& directory,
                                 std::span<const std::string> names,
                                 bool is_file);
};

// What `directory` holds, or one `file` of it, where that is not null. By the
// reader of `format`; where that is empty, by the first reader that recognises
// the names, and a file that none does as one of torch.save. kIncomplete where
// no reader recognises a directory, kInvalidArgument for another word.
Result<ForeignCatalog> ReadForeign(const Directory& directory,
                                   const std::string* file,
                                   std::string_view format);

// Of files that were looked at: ForeignCatalog::identity.
std::string IdentityOf(std::span<const ManifestFile> files,
                       std::span<const FileInfo> infos);

}  // namespace torch_ckpt
