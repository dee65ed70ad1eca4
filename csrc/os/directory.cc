#include "os/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "os/call.h"
#include "os/memory.h"
#include "os/names.h"
#include "os/path.h"
#include "os/patience.h"

namespace torch_ckpt {
namespace {

using internal::CheckName;
using internal::CheckPath;
using internal::OpenAt;
using internal::StatAt;
using internal::Steps;
using internal::SystemCall;

constexpr mode_t kDirectoryMode = 0777;

// An existing file is opened without blocking, so that a FIFO under a file's
// name cannot hang the reader; the flag goes again once the file is known to be
// a regular one, since some network file systems act on it.
Status CheckOpened(const File& file) {
  auto info = file.Stat();
  if (!info.ok()) return info.status();
  if (!info->is_regular) {
    return Corrupt(info->is_directory ? "is a directory, not a file"
                                      : "is not a regular file")
        .WithFile(file.path());
  }
  // Of the flags that this sets, it was opened with no other one.
  if (SystemCall("fcntl", file.path(),
                 [&] { return fcntl(file.fd(), F_SETFL, 0); }) < 0) {
    return Status::Io(errno, "fcntl", file.path());
  }
  return {};
}

}  // namespace

Result<Directory> Directory::Open(const std::string& path) {
  TC_RETURN_IF_ERROR(CheckPath(path));
  const int fd = OpenAt(AT_FDCWD, path.c_str(), path, O_RDONLY | O_DIRECTORY);
  if (fd < 0) return Status::Io(errno, "openat", path);
  Directory directory;
  directory.file_ = File(fd, path);
  return directory;
}

Status Directory::Create(const std::string& path) {
  TC_RETURN_IF_ERROR(CheckPath(path));
  Patience patience(kPatience);
  for (;;) {
    if (SystemCall("mkdirat", path, [&] {
          return mkdirat(AT_FDCWD, path.c_str(), kDirectoryMode);
        }) == 0) {
      return {};
    }
    if (errno != EEXIST) return Status::Io(errno, "mkdirat", path);
    const auto info = StatAt(AT_FDCWD, path, path, 0);
    if (info.ok() && *info) {
      return (*info)->is_directory ? Status()
                                   : Status::Io(ENOTDIR, "mkdirat", path);
    }
    if (!info.ok() && info.status().sys_errno() != ESTALE) return info.status();
    const auto entry = StatAt(AT_FDCWD, path, path, AT_SYMLINK_NOFOLLOW);
    if (entry.ok() && *entry && (*entry)->is_link) {
      return Status::Io(ENOENT, "fstatat", path);  // of what it points to
    }
    // Removed since, or long ago, on another node, and only remembered here.
    if (!patience.Wait()) return Status::Io(EEXIST, "mkdirat", path);
  }
}

Status Directory::CreateAll(const std::string& path) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(path));
  const std::string parent = ParentPath(absolute);
  for (const bool again : {false, true}) {
    if (SystemCall("mkdirat", absolute, [&] {
          return mkdirat(AT_FDCWD, absolute.c_str(), kDirectoryMode);
        }) == 0) {
      // Whoever commits into `path` syncs `path`, not what is above: every
      // name made on the way is made durable here.
      TC_ASSIGN_OR_RETURN(const Directory above, Open(parent));
      return above.Sync();
    }
    if (errno != ENOENT || again || absolute == "/") break;
    TC_RETURN_IF_ERROR(CreateAll(parent));
  }
  return Create(absolute);  // it is there already, or the error says why not
}

std::string Directory::Join(const std::string& name) const {
  const std::string& base = path();
  if (base.empty() || base.back() == '/') return base + name;
  return base + "/" + name;
}

Result<Directory> Directory::OpenDirectory(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  const int child =
      OpenAt(fd(), name.c_str(), joined, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (child < 0) return Status::Io(errno, "openat", joined);
  Directory directory;
  directory.file_ = File(child, joined);
  return directory;
}

Result<File> Directory::OpenFile(const std::string& path,
                                 OpenOptions options) const {
  if (const Steps steps(path); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, OpenDirectory(steps.first));
    return inner.OpenFile(steps.rest, options);
  }
  TC_RETURN_IF_ERROR(CheckName(*this, path));
  const std::string joined = Join(path);
  int flags = options.write ? O_RDWR : O_RDONLY;
  flags |= options.create_new ? O_CREAT | O_EXCL | O_NOFOLLOW : O_NONBLOCK;
  if (options.no_follow) flags |= O_NOFOLLOW;
  const int fd = OpenAt(this->fd(), path.c_str(), joined, flags);
  if (fd < 0) {
    Status failed = Status::Io(errno, "openat", joined);
    if (!options.create_new || failed.sys_errno() != EPERM) return failed;
    // What sshfs makes of every refusal of its server.
    const auto there = StatEntry(path);
    const bool exists = there.ok() && *there;
    return exists ? Status::Io(EEXIST, "openat", joined) : failed;
  }
  File file(fd, joined);
  if (!options.create_new) TC_RETURN_IF_ERROR(CheckOpened(file));
  return file;
}

Status Directory::MakeDirectory(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  if (SystemCall("mkdirat", joined, [&] {
        return mkdirat(fd(), name.c_str(), kDirectoryMode);
      }) < 0) {
    return Status::Io(errno, "mkdirat", joined);
  }
  return {};
}

Result<std::optional<FileInfo>> Directory::StatName(
    const std::string& path) const {
  if (const Steps steps(path); steps.deep()) {
    const Result<Directory> inner = OpenDirectory(steps.first);
    if (inner.ok()) return inner->StatName(steps.rest);
    if (inner.status().sys_errno() != ENOENT) return inner.status();
    return std::optional<FileInfo>();
  }
  TC_RETURN_IF_ERROR(CheckName(*this, path));
  return StatAt(fd(), path, Join(path), 0);
}

Result<std::optional<FileInfo>> Directory::StatEntry(
    const std::string& path) const {
  if (const Steps steps(path); steps.deep()) {
    const Result<Directory> inner = OpenDirectory(steps.first);
    if (inner.ok()) return inner->StatEntry(steps.rest);
    if (inner.status().sys_errno() != ENOENT) return inner.status();
    return std::optional<FileInfo>();
  }
  TC_RETURN_IF_ERROR(CheckName(*this, path));
  return StatAt(fd(), path, Join(path), AT_SYMLINK_NOFOLLOW);
}

Result<std::vector<std::string>> Directory::List() const {
  // An open of its own: the position that getdents moves belongs to the open
  // directory, and this one may be listed by several threads.
  const int own = OpenAt(fd(), ".", path(), O_RDONLY | O_DIRECTORY);
  if (own < 0) return Status::Io(errno, "openat", path());
  const File listing(own, path());
  std::vector<std::string> names;
  alignas(dirent64) std::array<char, 32768> buffer;
  for (;;) {
    const long got = SystemCall("getdents", path(), [&] {
      return syscall(SYS_getdents64, own, buffer.data(), buffer.size());
    });
    if (got < 0) return Status::Io(errno, "getdents", path());
    if (got == 0) break;
    for (size_t at = 0; at < static_cast<size_t>(got);) {
      const auto* entry = reinterpret_cast<const dirent64*>(buffer.data() + at);
      at += entry->d_reclen;
      const char* name =
          buffer.data() + at - entry->d_reclen + offsetof(dirent64, d_name);
      if (std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0) {
        names.emplace_back(name);
      }
    }
  }
  std::sort(names.begin(), names.end());
  // A directory that changes meanwhile may be told twice on network file
  // systems.
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Status Directory::Unlink(const std::string& path, bool missing_ok) const {
  if (const Steps steps(path); steps.deep()) {
    const Result<Directory> inner = OpenDirectory(steps.first);
    if (inner.ok()) return inner->Unlink(steps.rest, missing_ok);
    const bool missing = inner.status().sys_errno() == ENOENT;
    return missing && missing_ok ? Status() : inner.status();
  }
  TC_RETURN_IF_ERROR(CheckName(*this, path));
  const std::string joined = Join(path);
  if (SystemCall("unlinkat", joined,
                 [&] { return unlinkat(fd(), path.c_str(), 0); }) < 0 &&
      !(missing_ok && errno == ENOENT)) {
    return Status::Io(errno, "unlinkat", joined);
  }
  return {};
}

Status Directory::RemoveDirectory(const std::string& name,
                                  bool missing_ok) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  if (SystemCall("rmdir", joined,
                 [&] { return unlinkat(fd(), name.c_str(), AT_REMOVEDIR); }) <
          0 &&
      !(missing_ok && errno == ENOENT)) {
    return Status::Io(errno, "rmdir", joined);
  }
  return {};
}

Status Directory::Sync() const { return file_.Sync(); }

Result<std::string> Directory::ReadFile(const std::string& name,
                                        uint64_t max_bytes,
                                        OpenOptions options) const {
  constexpr size_t kStep = size_t{64} << 10;
  // So much the allocator maps by itself, and unmaps when it is freed.
  constexpr size_t kMappedText = size_t{64} << 20;
  TC_ASSIGN_OR_RETURN(const File file, OpenFile(name, options));
  // To its end and not to the size that stat says, which on a network file
  // system may still be that of the file before.
  std::string text;
  for (;;) {
    const size_t at = text.size();
    text.resize(at + kStep);
    TC_ASSIGN_OR_RETURN(
        const uint64_t got,
        file.Read({reinterpret_cast<std::byte*>(text.data()) + at, kStep}, at));
    text.resize(at + got);
    if (text.size() > max_bytes) {
      return Corrupt("has more than the " + std::to_string(max_bytes) +
                     " bytes that it may have")
          .WithFile(file.path());
    }
    if (got < kStep) return text;
    if (at > 0) continue;
    // A larger one, for which memory is asked at once.
    TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
    text.reserve(std::min(info.bytes, max_bytes) + kStep);
    if (text.capacity() >= kMappedText) {
      PreferHugePages(reinterpret_cast<std::byte*>(text.data()),
                      text.capacity());
    }
  }
}

Status Directory::WriteFile(const std::string& name,
                            const std::string& text) const {
  TC_ASSIGN_OR_RETURN(File file,
                      OpenFile(name, {.write = true, .create_new = true}));
  Status status = file.WriteAll(AsBytes(text), 0);
  if (status.ok()) status = file.Sync();
  Status closed = file.Close();
  if (status.ok()) status = std::move(closed);
  // A part of a file must not be found under this name; the first error is the
  // one worth telling.
  if (!status.ok()) (void)Unlink(name, /*missing_ok=*/true);
  return status;
}

}  // namespace torch_ckpt
