// A checkpoint directory, opened for reading.
//
// Opening never writes. Three kinds of directory are understood:
//   1. with our manifest (torch_ckpt.json, or the journal of a commit that is
//      not replayed yet, or the part manifests of all ranks of a save without
//      collectives): only what it names is read;
//   2. with a complete index: the files it names;
//   3. with .safetensors files only: all of them, by their headers.
// Which files of 2 and 3 count, engine/open/scan.h says.
// For 2 and 3 every header is parsed and every tensor is proved to be tiled by
// its boxes. For 1 that was done before the commit: opening reads the manifest
// and the catalog, whatever they name. A file is compared with the manifest
// when it is opened, a tensor's placements are proved when they are first asked
// for, since a rank of thousands needs few of either.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format/catalog.h"
#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

enum class CheckpointSource { kManifest, kIndex, kHeaders };
const char* CheckpointSourceName(CheckpointSource source);

// Immutable after OpenCheckpoint; const access is thread-safe.
class Checkpoint {
 public:
  const std::string& path() const { return directory_->path(); }
  CheckpointSource source() const { return source_; }
  const Catalog& catalog() const { return catalog_; }
  // All files that count, by which the catalog names them. Without a manifest
  // they have no digests.
  const std::vector<ManifestFile>& files() const { return manifest_.files; }
  // A position in files(); -1 where there is none of this name.
  int64_t FindFile(std::string_view name) const { return by_name_.Find(name); }
  // Null for directories without a manifest.
  const Manifest* manifest() const {
    return source_ == CheckpointSource::kManifest ? &manifest_ : nullptr;
  }
  std::string save_id() const { return manifest_.save_id; }
  // The same checkpoint with a catalog that is Renamed.
  Result<std::shared_ptr<const Checkpoint>> Renamed(
      const std::map<std::string, std::string>& new_names) const;
  // Those of a tensor or of what it is an alias of. Proves the first time that
  // the owners among them tile it. kCorrupt names the tensor.
  Result<std::vector<Placement>> Placements(uint32_t entry) const;
  // Tensors of a directory that is not ours whose shape no file says: were the
  // last of their shards missing, nobody could see it.
  const std::vector<std::string>& hulls() const { return hulls_; }
  // Data files of such a directory that are no part of the checkpoint.
  const std::vector<std::string>& beside() const { return beside_; }
  // Not that of another checkpoint: the save id, or what its files are.
  const std::string& identity() const {
    return manifest() ? manifest_.save_id : identity_;
  }

  // Files of a staging directory, by their names there, as something to read
  // from before there is a checkpoint. REQUIRES: the manifest names the files
  // of the catalog.
  static Result<std::shared_ptr<const Checkpoint>> OfStaged(
      const Directory& staging, Manifest manifest, Catalog catalog);

  // Opens a file of the checkpoint by its final name, wherever a commit has
  // left it, after comparing its size and, for data files, its file id (where
  // it is not the file `known`, whose id was compared) with manifest or
  // headers. kIncomplete when it is not there, kCorrupt when it is another
  // file, kConflict when that is so because another save stands there by now.
  // On a shared file system it looks for kPatience before it says so.
  Result<File> OpenFile(const std::string& name,
                        const FileInfo* known = nullptr) const;
  // Ok when every file is there, as OpenFile finds it. For who wants to know
  // before he reads: readers hear of each when they open it.
  Status CheckFiles() const;
  // Of a directory without a manifest, whose files have neither id nor digests:
  // kConflict when one of these is not what it was when its header was read. Ok
  // for any other.
  Status CheckUnchanged(const std::vector<uint32_t>& files) const;
  // A whole file with its digests checked. For files of the manifest.
  Result<std::string> ReadWhole(const std::string& name) const;
  // Does `step`, which reads files of this checkpoint. What it finds missing,
  // wrong or stale is kConflict ("is being replaced") when another save stands
  // there by now. On a shared file system it may also be what a cache still
  // shows: there the step is done again, anew from the file's name, for
  // kPatience. Any other status comes back as it is.
  Status UntilSure(const std::function<Status()>& step) const;
  // The same for what cannot be done again.
  Status Explain(const Status& status) const;
  // kConflict when another save stands there by now.
  Status CheckCurrent() const;

 private:
  friend Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
      const std::string& path);
  Status LoadCommitted(const std::string& manifest_text, bool journal);
  Status LoadParts(const std::vector<Manifest>& parts);
  Status LoadForeign();
  // The one catalog among `files`, which are the checkpoint's or a part's.
  Result<Catalog> ReadCatalog(const std::vector<ManifestFile>& files) const;
  // Of what says which boxes there are, for messages.
  std::string CatalogPath() const;
  // One look at a directory.
  struct Look {
    Status status;
    std::shared_ptr<Checkpoint> checkpoint;
    std::optional<std::string> text;  // of what names its files
    bool journal = false;             // `text` is one
    bool changed = false;             // under the look
    bool shared = false;              // IsShared
    bool late = false;                // an error may go with another look
  };
  static Look LookAt(const std::string& path);
  Result<File> LookForFile(const std::string& name,
                           const FileInfo* known) const;
  // What follows from manifest_ and catalog_, when they are in place.
  void Index();

  std::shared_ptr<const Directory> directory_;
  std::shared_ptr<const Directory> staging_;   // null without a journal
  std::map<std::string, std::string> staged_;  // final name -> name in staging
  CheckpointSource source_ = CheckpointSource::kHeaders;
  Manifest manifest_;  // of a foreign directory, the files alone
  FilesByName by_name_;
  Catalog catalog_;
  mutable std::vector<std::atomic<bool>> proved_;  // by entry
  mutable std::atomic<bool> believes_{false};      // what is missing or wrong
  std::vector<std::string> hulls_, beside_;
  std::string identity_;
  std::vector<FileInfo> seen_;  // without a manifest: of files(), at the scan
};

// Errors: kIncomplete when there is no checkpoint or a part of it is missing,
// kConflict while it is being replaced, kCorrupt. On a shared file system
// these come after kPatience only.
Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path);

// Where the files of a committed journal were staged: the directory of its
// save; the place itself once that is gone.
Result<Directory> JournalStaging(const Directory& root,
                                 const Manifest& manifest);

}  // namespace torch_ckpt
