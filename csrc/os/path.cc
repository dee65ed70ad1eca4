#include "os/path.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "os/names.h"

namespace torch_ckpt {

using internal::CheckPath;
using internal::StatAt;

Result<std::optional<FileInfo>> StatPath(const std::string& path) {
  TC_RETURN_IF_ERROR(CheckPath(path));
  return StatAt(AT_FDCWD, path, path, 0);
}

Result<std::optional<FileInfo>> StatPathEntry(const std::string& path) {
  TC_RETURN_IF_ERROR(CheckPath(path));
  return StatAt(AT_FDCWD, path, path, AT_SYMLINK_NOFOLLOW);
}

Result<std::string> AbsolutePath(const std::string& path) {
  TC_RETURN_IF_ERROR(CheckPath(path));
  std::string full = path;
  if (full.front() != '/') {
    const std::unique_ptr<char, decltype(&free)> cwd(getcwd(nullptr, 0), &free);
    if (cwd == nullptr) return Status::Io(errno, "getcwd", path);
    full = std::string(cwd.get()) + "/" + full;
  }
  std::string clean;
  for (size_t at = 0; at < full.size();) {
    const size_t end = std::min(full.find('/', at), full.size());
    const std::string part = full.substr(at, end - at);
    if (!part.empty() && part != ".") clean += "/" + part;
    at = end + 1;
  }
  if (clean.empty()) return std::string("/");
  if (BaseName(clean) != "..") return clean;
  // What ".." leads to has a name only when links are followed, and callers
  // need the name and the parent of what they get.
  const std::unique_ptr<char, decltype(&free)> real(
      realpath(clean.c_str(), nullptr), &free);
  if (real == nullptr) return Status::Io(errno, "realpath", path);
  return std::string(real.get());
}

std::string ParentPath(const std::string& absolute) {
  const size_t slash = absolute.rfind('/');
  if (slash == std::string::npos || slash == 0) return "/";
  return absolute.substr(0, slash);
}

std::string BaseName(const std::string& absolute) {
  return absolute.substr(absolute.rfind('/') + 1);
}

}  // namespace torch_ckpt
