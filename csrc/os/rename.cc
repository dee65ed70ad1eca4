// Directory's renames, and what can be said of them before.
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>

#include "os/call.h"
#include "os/directory.h"
#include "os/names.h"
#include "os/patience.h"

namespace torch_ckpt {
namespace {

using internal::CheckName;
using internal::LacksCall;
using internal::Steps;
using internal::SystemCall;

Status Exists(const std::string& target, const std::string& source) {
  return Conflict("exists already, so '" + source + "' was not renamed to it")
      .WithFile(target);
}

// For a file that can be neither renamed without replacing nor linked.
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

// For a directory that cannot be renamed without replacing.
Status MakeAndRename(const Directory& directory, const std::string& from,
                     const Directory& to, const std::string& to_name) {
  Patience patience(kPatience);
  for (;;) {
    Status made = to.MakeDirectory(to_name);
    if (made.sys_errno() == EEXIST) {
      // GlusterFS says so of what is not there while another node looks for it.
      TC_ASSIGN_OR_RETURN(const auto there, to.StatEntry(to_name));
      if (!there && patience.Wait()) continue;
      return Exists(to.Join(to_name), directory.Join(from));
    }
    TC_RETURN_IF_ERROR(std::move(made));
    Status renamed = directory.Rename(from, to, to_name);
    const int error = renamed.sys_errno();
    if (error == 0) return renamed;
    // It stays where others have begun to use it.
    const Status removed = to.RemoveDirectory(to_name, /*missing_ok=*/false);
    if (error != EEXIST && error != ENOTEMPTY && error != ENOTDIR) {
      return renamed;
    }
    // What could be removed was nobody else's.
    if (removed.ok() && patience.Wait()) continue;
    return Exists(to.Join(to_name), directory.Join(from));
  }
}

}  // namespace

// Over NFS a rename whose answer was lost is sent again and then says ENOENT,
// although it happened: a caller that must know looks at both names.
Status Directory::Rename(const std::string& from, const Directory& to,
                         const std::string& to_path) const {
  if (const Steps steps(from); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, OpenDirectory(steps.first));
    return inner.Rename(steps.rest, to, to_path);
  }
  if (const Steps steps(to_path); steps.deep()) {
    TC_ASSIGN_OR_RETURN(const Directory inner, to.OpenDirectory(steps.first));
    return Rename(from, inner, steps.rest);
  }
  TC_RETURN_IF_ERROR(CheckName(*this, from));
  TC_RETURN_IF_ERROR(CheckName(to, to_path));
  const std::string source = Join(from), target = to.Join(to_path);
  if (SystemCall("renameat", source, target, [&] {
        return renameat(fd(), from.c_str(), to.fd(), to_path.c_str());
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
  if (!LacksCall(errno)) {
    return Status::Io(errno, "renameat2 to '" + target + "'", source);
  }
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatEntry(from));
  if (!info) return Status::Io(ENOENT, "renameat to '" + target + "'", source);
  if (info->is_directory) {
    return MakeAndRename(*this, from, to, to_name);
  }
  if (SystemCall("linkat", source, target, [&] {
        return linkat(fd(), from.c_str(), to.fd(), to_name.c_str(), 0);
      }) < 0) {
    const int error = errno;
    if (LacksCall(error) || error == EPERM || error == EMLINK) {
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

Status Directory::CheckReplaceable(const std::string& path) const {
  if (const Steps steps(path); steps.deep()) {
    const Result<Directory> inner = OpenDirectory(steps.first);
    if (inner.ok()) return inner->CheckReplaceable(steps.rest);
    const int error = inner.status().sys_errno();
    if (error == ENOENT) return {};
    if (error != ENOTDIR) return inner.status();
    return Conflict(
               "is no directory, and a file of the checkpoint lies below a "
               "directory of this name")
        .WithFile(Join(steps.first));
  }
  TC_RETURN_IF_ERROR(CheckName(*this, path));
  const std::string joined = Join(path);
  struct statx file, own;
  if (SystemCall("statx", joined, [&] {
        return statx(fd(), path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS,
                     &file);
      }) < 0) {
    // The step itself will tell.
    if (errno == ENOENT || internal::UnknownCall(errno)) return {};
    return Status::Io(errno, "statx", joined);
  }
  if (S_ISDIR(file.stx_mode)) {
    return Conflict(
               "is a directory, and a file of the checkpoint has this name")
        .WithFile(joined);
  }
  if (SystemCall("statx", this->path(), [&] {
        return statx(fd(), "", AT_EMPTY_PATH, STATX_BASIC_STATS, &own);
      }) < 0) {
    return Status::Io(errno, "statx", this->path());
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

}  // namespace torch_ckpt
