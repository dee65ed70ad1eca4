// Directories, by descriptor: names are resolved relative to an open directory,
// so that a checkpoint cannot change under a path while it is being used.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt {

struct OpenOptions {
  bool write = false;       // O_RDWR instead of O_RDONLY
  bool create_new = false;  // O_CREAT | O_EXCL | O_NOFOLLOW, mode 0666 & ~umask
};

// Movable, not copyable. Const members may be called from several threads.
class Directory {
 public:
  Directory() = default;
  static Result<Directory> Open(const std::string& path);
  // mkdir, tolerating one that exists (a symlink to a directory is fine).
  static Status Create(const std::string& path);
  static Status CreateAll(const std::string& path);  // and its parents

  bool valid() const { return file_.valid(); }
  int fd() const { return file_.fd(); }
  const std::string& path() const { return file_.path(); }
  std::string Join(const std::string& name) const;

  Result<File> OpenFile(const std::string& name, OpenOptions options) const;
  Result<Directory> OpenDirectory(const std::string& name) const;
  Status MakeDirectory(const std::string& name) const;  // EEXIST is an error
  // nullopt when there is no such name; follows links.
  Result<std::optional<FileInfo>> StatName(const std::string& name) const;
  // Whether the name itself is a symbolic link; false when there is none.
  Result<bool> IsLink(const std::string& name) const;
  Result<FileInfo> Stat() const { return file_.Stat(); }
  // All names but "." and "..", sorted.
  Result<std::vector<std::string>> List() const;
  Status Unlink(const std::string& name, bool missing_ok) const;
  Status RemoveDirectory(const std::string& name, bool missing_ok) const;
  // Renames over an existing file. `to` may be this directory.
  Status Rename(const std::string& from, const Directory& to,
                const std::string& to_name) const;
  // RENAME_NOREPLACE; kConflict when the target exists, kUnsupported when the
  // file system lacks it.
  Status RenameNoReplace(const std::string& from, const Directory& to,
                         const std::string& to_name) const;
  Status Sync() const;  // fsync of the directory itself

  // Whole small files. ReadFile refuses more than max_bytes (kCorrupt);
  // WriteFile creates `name` new, writes, fsyncs and closes it.
  Result<std::string> ReadFile(const std::string& name,
                               uint64_t max_bytes) const;
  Status WriteFile(const std::string& name, const std::string& text) const;

 private:
  File file_;
};

// Absolute path without "." and trailing "/", not resolving links.
Result<std::string> AbsolutePath(const std::string& path);
std::string ParentPath(const std::string& absolute);
std::string BaseName(const std::string& absolute);

}  // namespace torch_ckpt
