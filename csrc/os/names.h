// What a directory's names and paths may be, and the calls that take them.
// For the files of os/ only.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <optional>
#include <string>

#include "base/status.h"
#include "os/call.h"
#include "os/directory.h"

namespace torch_ckpt::internal {

// A C string would end at a NUL and name another file.
inline Status CheckPath(const std::string& path) {
  if (path.empty()) return InvalidArgument("the path is empty");
  if (path.find('\0') != std::string::npos) {
    return InvalidArgument("the path has a NUL byte in it");
  }
  return {};
}

// A name of this directory, so that none can lead out of it.
inline Status CheckName(const Directory& directory, const std::string& name) {
  if (name.empty() || name == "." || name == ".." ||
      name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    return InvalidArgument("'" + name + "' is not the name of a file")
        .WithFile(directory.path());
  }
  return {};
}

// The first name of a path, and the rest of it: of a plain name there is none.
struct Steps {
  explicit Steps(const std::string& path)
      : slash(path.find('/')),
        first(path.substr(0, slash)),
        rest(slash == path.npos ? "" : path.substr(slash + 1)) {}
  bool deep() const { return slash != std::string::npos; }
  size_t slash;
  std::string first, rest;
};

constexpr mode_t kFileMode = 0666;  // the kernel takes the umask off

inline int OpenAt(int at, const char* name, const std::string& path,
                  int flags) {
  return SystemCall("openat", path, [&] {
    return openat(at, name, flags | O_CLOEXEC, kFileMode);
  });
}

// nullopt when there is no such name.
inline Result<std::optional<FileInfo>> StatAt(int at, const std::string& name,
                                              const std::string& path,
                                              int flags) {
  struct stat st;
  if (SystemCall("fstatat", path,
                 [&] { return fstatat(at, name.c_str(), &st, flags); }) < 0) {
    if (errno == ENOENT) return std::optional<FileInfo>();
    return Status::Io(errno, "fstatat", path);
  }
  return std::optional<FileInfo>(ToFileInfo(st));
}

}  // namespace torch_ckpt::internal
