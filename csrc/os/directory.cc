#include "os/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "os/call.h"
#include "os/patience.h"

namespace torch_ckpt {
namespace {

using internal::SystemCall;

constexpr mode_t kFileMode = 0666;  // the kernel takes the umask off
constexpr mode_t kDirectoryMode = 0777;

// A C string would end at a NUL and name another file.
Status CheckPath(const std::string& path) {
  if (path.empty()) return InvalidArgument("the path is empty");
  if (path.find('\0') != std::string::npos) {
    return InvalidArgument("the path has a NUL byte in it");
  }
  return {};
}

// A name of this directory, so that none can lead out of it.
Status CheckName(const Directory& directory, const std::string& name) {
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

int OpenAt(int at, const char* name, const std::string& path, int flags) {
  return SystemCall("openat", path, [&] {
    return openat(at, name, flags | O_CLOEXEC, kFileMode);
  });
}

// nullopt when there is no such name.
Result<std::optional<FileInfo>> StatAt(int at, const std::string& name,
                                       const std::string& path, int flags) {
  struct stat st;
  if (SystemCall("fstatat", path,
                 [&] { return fstatat(at, name.c_str(), &st, flags); }) < 0) {
    if (errno == ENOENT) return std::optional<FileInfo>();
    return Status::Io(errno, "fstatat", path);
  }
  return std::optional<FileInfo>(internal::ToFileInfo(st));
}

// What the file system, or the program behind it, says to a call or a flag of
// it that it does not know.
bool LacksIt(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP;
}

Status Exists(const std::string& target, const std::string& source) {
  return Conflict("exists already, so '" + source + "' was not renamed to it")
      .WithFile(target);
}

// For what can be neither renamed without replacing nor linked.
Status LookAndRename(const Directory& directory, const std::string& from,
                     const Directory& to, const std::string& to_name) {
  TC_ASSIGN_OR_RETURN(const auto there, to.StatEntry(to_name));
  if (there) return Exists(to.Join(to_name), directory.Join(from));
  Status renamed = directory.Rename(from, to, to_name);
  const int error = renamed.sys_errno();
  if (error == EEXIST || error == ENOTEMPTY || error == ENOTDIR) {
    return Exists(to.Join(to_name), directory.Join(from));
  }
  return renamed;
}

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
  const int flags = SystemCall("fcntl", file.path(),
                               [&] { return fcntl(file.fd(), F_GETFL); });
  if (flags < 0) return Status::Io(errno, "fcntl", file.path());
  if (SystemCall("fcntl", file.path(), [&] {
        return fcntl(file.fd(), F_SETFL, flags & ~O_NONBLOCK);
      }) < 0) {
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

Result<Directory> Directory::Inner(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  const int child =
      OpenAt(fd(), name.c_str(), joined, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (child < 0) return Status::Io(errno, "openat", joined);
  Directory directory;
  directory.file_ = File(child, joined);
  return directory;
}

Result<File> Directory::OpenFile(const std::string& name,
                                 OpenOptions options) const {
  if (const Steps steps(name); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, Inner(steps.first));
    return inner.OpenFile(steps.rest, options);
  }
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  int flags = options.write ? O_RDWR : O_RDONLY;
  flags |= options.create_new ? O_CREAT | O_EXCL | O_NOFOLLOW : O_NONBLOCK;
  const int fd = OpenAt(this->fd(), name.c_str(), joined, flags);
  if (fd < 0) {
    Status failed = Status::Io(errno, "openat", joined);
    if (!options.create_new || failed.sys_errno() != EPERM) return failed;
    // What sshfs makes of every refusal of its server.
    const auto there = StatEntry(name);
    const bool exists = there.ok() && *there;
    return exists ? Status::Io(EEXIST, "openat", joined) : failed;
  }
  File file(fd, joined);
  if (!options.create_new) TC_RETURN_IF_ERROR(CheckOpened(file));
  return file;
}

Result<Directory> Directory::OpenDirectory(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  const int child = OpenAt(fd(), name.c_str(), joined, O_RDONLY | O_DIRECTORY);
  if (child < 0) return Status::Io(errno, "openat", joined);
  Directory directory;
  directory.file_ = File(child, joined);
  return directory;
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

Status Directory::MakeParents(const std::string& path) const {
  const Steps steps(path);
  if (!steps.deep()) return {};
  Result<Directory> inner = Inner(steps.first);
  if (inner.status().sys_errno() == ENOENT) {
    TC_RETURN_IF_ERROR(MakeDirectory(steps.first));
    inner = Inner(steps.first);
  }
  return inner.ok() ? inner->MakeParents(steps.rest) : inner.status();
}

Status Directory::RemoveEmptyParents(const std::string& path) const {
  const Steps steps(path);
  if (!steps.deep()) return {};
  {
    const Result<Directory> inner = Inner(steps.first);
    if (!inner.ok()) {
      return inner.status().sys_errno() == ENOENT ? Status() : inner.status();
    }
    TC_RETURN_IF_ERROR(inner->RemoveEmptyParents(steps.rest));
  }
  (void)RemoveDirectory(steps.first, /*missing_ok=*/true);
  return {};
}

Status Directory::SyncParents(const std::vector<std::string>& paths) const {
  std::map<std::string, std::vector<std::string>> below;
  for (const std::string& path : paths) {
    Steps steps(path);
    if (steps.deep()) below[steps.first].push_back(std::move(steps.rest));
  }
  for (const auto& [name, rest] : below) {
    const Result<Directory> inner = Inner(name);
    if (inner.status().sys_errno() == ENOENT) continue;
    TC_RETURN_IF_ERROR(inner.status());
    TC_RETURN_IF_ERROR(inner->SyncParents(rest));
    TC_RETURN_IF_ERROR(inner->Sync());
  }
  return {};
}

Result<bool> Directory::IsLink(const std::string& name) const {
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatEntry(name));
  return info && info->is_link;
}

Result<std::optional<FileInfo>> Directory::StatName(
    const std::string& name) const {
  if (const Steps steps(name); steps.deep()) {
    const Result<Directory> inner = Inner(steps.first);
    if (inner.ok()) return inner->StatName(steps.rest);
    if (inner.status().sys_errno() != ENOENT) return inner.status();
    return std::optional<FileInfo>();
  }
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  return StatAt(fd(), name, Join(name), 0);
}

Result<std::optional<FileInfo>> Directory::StatEntry(
    const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  return StatAt(fd(), name, Join(name), AT_SYMLINK_NOFOLLOW);
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

Status Directory::Unlink(const std::string& name, bool missing_ok) const {
  if (const Steps steps(name); steps.deep()) {
    const Result<Directory> inner = Inner(steps.first);
    if (inner.ok()) return inner->Unlink(steps.rest, missing_ok);
    const bool missing = inner.status().sys_errno() == ENOENT;
    return missing && missing_ok ? Status() : inner.status();
  }
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  if (SystemCall("unlinkat", joined,
                 [&] { return unlinkat(fd(), name.c_str(), 0); }) < 0 &&
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

// Over NFS a rename whose answer was lost is sent again and then says ENOENT,
// although it happened: a caller that must know looks at both names.
Status Directory::Rename(const std::string& from, const Directory& to,
                         const std::string& to_name) const {
  if (const Steps steps(from); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, Inner(steps.first));
    return inner.Rename(steps.rest, to, to_name);
  }
  if (const Steps steps(to_name); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, to.Inner(steps.first));
    return Rename(from, inner, steps.rest);
  }
  TC_RETURN_IF_ERROR(CheckName(*this, from));
  TC_RETURN_IF_ERROR(CheckName(to, to_name));
  const std::string source = Join(from), target = to.Join(to_name);
  if (SystemCall("renameat", source, target, [&] {
        return renameat(fd(), from.c_str(), to.fd(), to_name.c_str());
      }) < 0) {
    return Status::Io(errno, "renameat to '" + target + "'", source);
  }
  return {};
}

Status Directory::RenameNoReplace(const std::string& from, const Directory& to,
                                  const std::string& to_name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, from));
  TC_RETURN_IF_ERROR(CheckName(to, to_name));
  const std::string source = Join(from), target = to.Join(to_name);
  if (SystemCall("renameat2", source, target, [&] {
        return renameat2(fd(), from.c_str(), to.fd(), to_name.c_str(),
                         RENAME_NOREPLACE);
      }) == 0) {
    return {};
  }
  if (errno == EEXIST || errno == ENOTEMPTY) return Exists(target, source);
  if (!LacksIt(errno)) {
    return Status::Io(errno, "renameat2 to '" + target + "'", source);
  }
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatEntry(from));
  if (!info) return Status::Io(ENOENT, "renameat to '" + target + "'", source);
  if (info->is_directory) {
    return LookAndRename(*this, from, to, to_name);
  }
  if (SystemCall("linkat", source, target, [&] {
        return linkat(fd(), from.c_str(), to.fd(), to_name.c_str(), 0);
      }) < 0) {
    const int error = errno;
    if (LacksIt(error) || error == EPERM || error == EMLINK) {
      return LookAndRename(*this, from, to, to_name);
    }
    if (error != EEXIST) {
      return Status::Io(error, "linkat to '" + target + "'", source);
    }
    // Over NFS the link may be ours: a request whose answer was lost is sent
    // again.
    TC_ASSIGN_OR_RETURN(const auto there, to.StatEntry(to_name));
    if (!there || !there->SameFile(*info)) return Exists(target, source);
  }
  return Unlink(from, /*missing_ok=*/true);
}

Status Directory::RemoveTree(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  // Not a look and then a step: what is no directory, a link too, goes so.
  Status first = Unlink(name, /*missing_ok=*/true);
  if (first.sys_errno() != EISDIR && first.sys_errno() != EPERM) return first;
  const Result<Directory> inner = Inner(name);
  if (!inner.ok()) {
    return inner.status().sys_errno() == ENOTDIR ? first : inner.status();
  }
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, inner->List());
  first = Status();
  for (const std::string& entry : names) {
    Status removed = inner->RemoveTree(entry);
    if (first.ok()) first = std::move(removed);
  }
  Status removed = RemoveDirectory(name, /*missing_ok=*/true);
  return first.ok() ? removed : first;
}

Status Directory::CheckReplaceable(const std::string& name) const {
  if (const Steps steps(name); steps.deep()) {
    const Result<Directory> inner = Inner(steps.first);
    if (inner.ok()) return inner->CheckReplaceable(steps.rest);
    const int error = inner.status().sys_errno();
    if (error == ENOENT) return {};
    if (error != ENOTDIR) return inner.status();
    return Conflict(
               "is no directory, and a file of the checkpoint lies below a "
               "directory of this name")
        .WithFile(Join(steps.first));
  }
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  const std::string joined = Join(name);
  struct statx file, own;
  if (SystemCall("statx", joined, [&] {
        return statx(fd(), name.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS,
                     &file);
      }) < 0) {
    // A sandbox or a kernel that does not know the call; the step itself will
    // tell.
    if (errno == ENOENT || errno == ENOSYS || errno == EPERM) return {};
    return Status::Io(errno, "statx", joined);
  }
  if (S_ISDIR(file.stx_mode)) {
    return Conflict(
               "is a directory, and a file of the checkpoint has this name")
        .WithFile(joined);
  }
  if (SystemCall("statx", path(), [&] {
        return statx(fd(), "", AT_EMPTY_PATH, STATX_BASIC_STATS, &own);
      }) < 0) {
    return Status::Io(errno, "statx", path());
  }
  constexpr uint64_t kFixed = STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND;
  if ((file.stx_attributes & kFixed) != 0 ||
      (own.stx_attributes & kFixed) != 0) {
    return Conflict("is immutable or append-only: it cannot be replaced")
        .WithFile(joined);
  }
  const uid_t user = geteuid();
  if ((own.stx_mode & S_ISVTX) != 0 && user != 0 && user != file.stx_uid &&
      user != own.stx_uid) {
    return Conflict(
               "belongs to another user, in a directory whose sticky bit keeps "
               "everybody else from replacing it")
        .WithFile(joined);
  }
  return {};
}

Status Directory::Sync() const { return file_.Sync(); }

Result<std::string> Directory::ReadFile(const std::string& name,
                                        uint64_t max_bytes) const {
  constexpr size_t kStep = size_t{64} << 10;
  TC_ASSIGN_OR_RETURN(const File file, OpenFile(name, {}));
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
