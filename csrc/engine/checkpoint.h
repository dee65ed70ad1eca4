// A checkpoint directory, opened for reading.
//
// Opening never writes. Three kinds of directory are understood:
//   1. with our manifest (torch_ckpt.json, or the journal of a commit that is
//      not replayed yet, or the part manifests of all ranks of a save without
//      collectives): only what it names is read;
//   2. with a complete model.safetensors.index.json: the files it names;
//   3. with .safetensors files only: all of them, by their headers.
// For 2 and 3 every header is parsed and every tensor is proved to be tiled by
// its boxes; for 1 that was done before the commit, and the sizes of all files
// are compared here.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "format/catalog.h"
#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

enum class CheckpointSource { kManifest, kIndex, kHeaders };
const char* CheckpointSourceName(CheckpointSource source);

// Immutable after OpenCheckpoint; const access is thread-safe.
class Checkpoint {
 public:
  const std::string& path() const { return directory_.path(); }
  CheckpointSource source() const { return source_; }
  const Catalog& catalog() const { return catalog_; }
  // Null for directories without a manifest.
  const Manifest* manifest() const { return manifest_ ? &*manifest_ : nullptr; }
  std::string save_id() const { return manifest_ ? manifest_->save_id : ""; }
  // Tensors of a directory that is not ours whose shape no file says: were the
  // last of their shards missing, nobody could see it.
  const std::vector<std::string>& hulls() const { return hulls_; }

  // Files of a staging directory, by their names there, as something to read
  // from before there is a checkpoint. REQUIRES: the manifest names the files
  // of the catalog.
  static Result<std::shared_ptr<const Checkpoint>> OfStaged(
      const Directory& staging, Manifest manifest, Catalog catalog);

  // Opens a file of the checkpoint by its final name, wherever a commit has
  // left it, after comparing its size and, for data files, its file id (not
  // with `direct`, which needs aligned memory: compare the inode) with manifest
  // or headers. kIncomplete when it is not there, kCorrupt when it is another
  // file, kConflict when that is so because another save stands there by now.
  Result<File> OpenFile(const std::string& name, bool direct) const;
  // A whole file with its digests checked. For files of the manifest.
  Result<std::string> ReadWhole(const std::string& name) const;
  // What a failed read of this checkpoint means: files that are missing or
  // wrong because another save stands there by now are kConflict ("is being
  // replaced"); any other status comes back as it is.
  Status Explain(Status status) const;
  // kConflict when another save stands there by now.
  Status CheckCurrent() const;

 private:
  friend Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
      const std::string& path,
      const std::map<std::string, std::string>& new_names);
  Status LoadCommitted(const std::string& manifest_text, bool journal);
  Status LoadParts(const std::vector<Manifest>& parts);
  Status LoadForeign();
  // Decodes catalog `file` of `manifest`, which is the checkpoint's or a
  // part's, and compares the two.
  Result<Catalog> ReadCatalog(const ManifestFile& file,
                              const Manifest& manifest) const;
  Result<File> FindFile(const std::string& name, bool direct) const;

  Directory directory_;
  Directory staging_;                          // valid while a journal stands
  std::map<std::string, std::string> staged_;  // final name -> name in staging
  CheckpointSource source_ = CheckpointSource::kHeaders;
  std::optional<Manifest> manifest_;
  Catalog catalog_;
  std::vector<std::string> hulls_;
};

// Errors: kIncomplete when there is no checkpoint or a part of it is missing,
// kConflict while it is being replaced (after five tries), kCorrupt. With
// `new_names` its catalog is a Renamed one.
Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path,
    const std::map<std::string, std::string>& new_names = {});

inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

}  // namespace torch_ckpt
