#include "engine/remove.h"

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit.h"
#include "engine/previous.h"
#include "engine/staging.h"
#include "format/names.h"
#include "os/directory.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

// What the manifests name. kIncomplete where there is none.
Result<Previous> Named(const std::string& path) {
  const Result<Directory> directory = Directory::Open(path);
  if (!directory.ok()) {
    if (directory.status().sys_errno() != ENOENT) return directory.status();
    return Incomplete("there is no such directory").WithFile(path);
  }
  TC_ASSIGN_OR_RETURN(Previous named, ReadPrevious(*directory));
  if (named.manifest || !named.part_manifests.empty()) return named;
  return Incomplete("holds no checkpoint of torch_ckpt: there is no " +
                    std::string(kManifestName))
      .WithFile(path);
}

// Whether it was there. What is a directory by now, or lies below what is none,
// is not the file that the manifest means.
Result<bool> Unlinked(const Directory& directory, const std::string& name) {
  const Status status = directory.Unlink(name, /*missing_ok=*/false);
  const int error = status.sys_errno();
  if (error == ENOENT || error == EISDIR || error == ENOTDIR ||
      error == ELOOP) {
    return false;
  }
  if (!status.ok()) return status;
  return true;
}

// Steps 2 and 3.
Result<std::vector<std::string>> UnlinkAll(const Directory& directory,
                                           const Previous& named) {
  std::vector<std::string> removed;
  for (const ManifestFile& file : named.files) {
    TC_ASSIGN_OR_RETURN(const bool was, Unlinked(directory, file.name));
    if (was) removed.push_back(file.name);
  }
  // Those too that a killed removal has left; what holds files of others stays.
  for (const ManifestFile& file : named.files) {
    (void)directory.RemoveEmptyParents(file.name);
  }
  TC_RETURN_IF_ERROR(directory.SyncParents(removed));
  TC_RETURN_IF_ERROR(directory.Sync());
  std::vector<std::string> manifests = named.part_manifests;
  if (named.manifest) manifests.emplace_back(kManifestName);
  for (std::string& name : manifests) {
    TC_RETURN_IF_ERROR(directory.Unlink(name, /*missing_ok=*/true));
    removed.push_back(std::move(name));
  }
  TC_RETURN_IF_ERROR(directory.Sync());
  return removed;
}

}  // namespace

Result<RemovedCheckpoint> RemoveCheckpoint(const std::string& path) {
  TC_ASSIGN_OR_RETURN(const std::string target, AbsolutePath(path));
  TC_ASSIGN_OR_RETURN(const auto entry, StatPathEntry(target));
  if (entry && entry->is_link) {
    return InvalidArgument(
               "is a symbolic link; remove the checkpoint that it points to")
        .WithFile(target);
  }
  TC_RETURN_IF_ERROR(RecoverDirectory(target).status());
  // Before the lock, which would make a place to stage in.
  TC_RETURN_IF_ERROR(Named(target).status());
  TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(target, true));
  // Under the lock: no save can replace what is about to go.
  TC_ASSIGN_OR_RETURN(const Previous named, Named(target));
  TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(target));
  RemovedCheckpoint out;
  TC_ASSIGN_OR_RETURN(out.removed, UnlinkAll(directory, named));
  session.End();
  // It stays where it holds files of others, is a mount point, or stands in a
  // directory that we may not write: the checkpoint is gone all the same.
  const Result<Directory> parent = Directory::Open(ParentPath(target));
  out.directory =
      parent.ok() &&
      parent->RemoveDirectory(BaseName(target), /*missing_ok=*/false).ok();
  if (out.directory) {
    TC_RETURN_IF_ERROR(parent->Sync());
  } else {
    TC_ASSIGN_OR_RETURN(out.left, directory.List());
  }
  return out;
}

}  // namespace torch_ckpt
