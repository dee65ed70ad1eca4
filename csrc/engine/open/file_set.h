// Files that jobs read, by number: those of a checkpoint, or those that ranks
// have left in staging for its commit.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// What there is to know of files before one is opened.
struct FileList {
  std::shared_ptr<const Directory> directory;
  std::vector<ManifestFile> files;  // by their names there
  bool has_digests = true;          // all of them or none
  // Files that a commit has not renamed yet, by their names in `directory`, and
  // where they are: a directory, and their names in it.
  std::shared_ptr<const Directory> staging = {};  // null: there are none
  std::map<std::string, std::string> staged = {};
  // Without digests: what each file was before its header was read.
  std::vector<FileInfo> seen = {};
  // kConflict when other files have taken the place of these; null where none
  // ever do.
  std::function<Status()> check_current = {};
};

// Immutable; const access is thread-safe.
class FileSet {
 public:
  explicit FileSet(FileList list);
  FileSet(const FileSet&) = delete;
  FileSet& operator=(const FileSet&) = delete;

  const std::string& path() const { return list_.directory->path(); }
  const std::vector<ManifestFile>& files() const { return list_.files; }
  // A position in files(); -1 where there is none of this name.
  int64_t FindFile(std::string_view name) const { return by_name_.Find(name); }
  bool has_digests() const { return list_.has_digests; }

  // Opens a file, wherever a commit has left it, after comparing its size and,
  // where it has one inside, its file id (but not of the file `known`, whose id
  // was compared) with what is listed. kIncomplete when it is not there,
  // kCorrupt when it is another file, kConflict when that is so because others
  // have taken the place of these files by now. On a shared file system it
  // looks for kPatience before it says so.
  Result<File> OpenFile(uint32_t file, const FileInfo* known = nullptr) const;
  // Ok when every file is there, as OpenFile finds it, or was when the
  // checkpoint was opened: of others each was looked at then. For who wants to
  // know before he reads: readers hear of each when they open it.
  Status CheckFiles() const;
  // Of files without digests, which have no ids either: kConflict when one of
  // these is not what it was when its header was read. Ok for any other.
  Status CheckUnchanged(const std::vector<uint32_t>& files) const;
  // A whole file with its digests checked. REQUIRES: has_digests().
  Result<std::string> ReadWhole(uint32_t file) const;

  // Does `step`, which reads these files. What it finds missing, wrong or stale
  // is kConflict ("is being replaced") when others have taken their place by
  // now. On a shared file system it may also be what a cache still shows: there
  // the step is done again, anew from the file's name, for kPatience. Any other
  // status comes back as it is.
  Status UntilSure(const std::function<Status()>& step) const;
  // The same for what cannot be done again.
  Status Explain(const Status& status) const;
  // kConflict when others have taken their place by now.
  Status CheckCurrent() const;

 private:
  Result<File> LookForFile(const ManifestFile& listed,
                           const FileInfo* known) const;

  const FileList list_;
  const FilesByName by_name_;
  mutable std::atomic<bool> believes_{false};  // what is missing or wrong
};

}  // namespace torch_ckpt
