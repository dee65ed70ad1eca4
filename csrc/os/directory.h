// Directories, by descriptor: names are resolved relative to an open directory,
// so that a checkpoint cannot change under a path while it is being used.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt {

struct OpenOptions {
  bool write = false;       // O_RDWR instead of O_RDONLY
  bool create_new = false;  // O_CREAT | O_EXCL | O_NOFOLLOW, mode 0666 & ~umask
  bool no_follow = false;   // ELOOP where the name is a link
};

// Movable, not copyable. Const members may be called from several threads.
//
// A `path` below the directory is a name, or several with '/' between them: all
// but the last are directories, opened one below the other and never through a
// link. Where one of them is missing, so is what it leads to.
class Directory {
 public:
  Directory() = default;
  static Result<Directory> Open(const std::string& path);
  // mkdir, tolerating one that exists (a symlink to a directory is fine).
  // EEXIST where a name stays for seconds that leads to nothing.
  static Status Create(const std::string& path);
  static Status CreateAll(const std::string& path);  // and its parents

  bool valid() const { return file_.valid(); }
  int fd() const { return file_.fd(); }
  const std::string& path() const { return file_.path(); }
  std::string Join(const std::string& name) const;

  Result<File> OpenFile(const std::string& path, OpenOptions options) const;
  // The directory `name` itself: where that is a link, ENOTDIR.
  Result<Directory> OpenDirectory(const std::string& name) const;
  Status MakeDirectory(const std::string& name) const;  // EEXIST is an error
  // Makes the directories that lead to the paths, where they are missing.
  Status MakeParents(const std::vector<std::string>& paths) const;
  // Removes those that are empty, the last one first; the others stay.
  Status RemoveEmptyParents(const std::string& path) const;
  // fsync of those that the paths lead through, as far as there are any.
  Status SyncParents(const std::vector<std::string>& paths) const;
  // nullopt when there is no such name; follows links.
  Result<std::optional<FileInfo>> StatName(const std::string& path) const;
  // The same of the name itself: a symbolic link is one, and not followed.
  Result<std::optional<FileInfo>> StatEntry(const std::string& path) const;
  Result<FileInfo> Stat() const { return file_.Stat(); }
  // All names but "." and "..", sorted.
  Result<std::vector<std::string>> List() const;
  Status Unlink(const std::string& path, bool missing_ok) const;
  Status RemoveDirectory(const std::string& name, bool missing_ok) const;
  // Removes a file, or a directory with all that is in it, without following
  // links. What is not there is removed already. Goes on after an error and
  // returns the first one. `for_each` does a step for each of so many entries
  // of that directory, in any order or at once.
  using ForEach = std::function<Status(
      size_t count, const std::function<Status(size_t)>& step)>;
  static Status InTurn(size_t count, const std::function<Status(size_t)>& step);
  Status RemoveTree(const std::string& name,
                    const ForEach& for_each = InTurn) const;
  // Ok where a file could be renamed to `path`, or `path` unlinked, as far as
  // can be seen: kConflict, saying why, for a directory, and for what the mode
  // or the attributes of file or directory keep this process from replacing.
  Status CheckReplaceable(const std::string& path) const;
  // Renames a path over what there is under the other. `to` may be this
  // directory.
  Status Rename(const std::string& from, const Directory& to,
                const std::string& to_path) const;
  // Renames to a name that nothing may have: kConflict when something does.
  // Where the file system knows no RENAME_NOREPLACE (NFS, many FUSE ones), a
  // file is linked to its new name and unlinked from the old one, which is as
  // atomic: until the second step it has both names. For a directory an empty
  // one is made under the new name, of which there can be one only, and renamed
  // over, which fails once something is in it. A file where there are no hard
  // links either is renamed after a look at the new name: one that comes to be
  // there in that moment is replaced.
  Status RenameNoReplace(const std::string& from, const Directory& to,
                         const std::string& to_name) const;
  Status Sync() const;  // fsync of the directory itself

  // Whole small files. ReadFile refuses more than max_bytes (kCorrupt);
  // WriteFile creates `name` new, writes, fsyncs and closes it.
  Result<std::string> ReadFile(const std::string& name, uint64_t max_bytes,
                               OpenOptions options = {}) const;
  Status WriteFile(const std::string& name, const std::string& text) const;

 private:
  File file_;
};

}  // namespace torch_ckpt
