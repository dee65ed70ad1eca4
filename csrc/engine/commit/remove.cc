#include "engine/commit/remove.h"

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit/commit.h"
#include "engine/commit/previous.h"
#include "engine/commit/staging.h"
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

// Steps 2 and 3.
Result<std::vector<std::string>> UnlinkAll(const SaveSession& session,
                                           const Directory& directory,
                                           const Previous& named) {
  std::vector<std::string> removed, gone;
  for (const ManifestFile& file : named.files) {
    const Status status = directory.Unlink(file.name, /*missing_ok=*/false);
    const int error = status.sys_errno();
    // What is a directory by now, or lies below what is none, is not the file
    // that the manifest means.
    if (error == EISDIR || error == ENOTDIR || error == ELOOP) continue;
    if (!status.ok() && error != ENOENT) return status;
    if (status.ok()) removed.push_back(file.name);
    // What a killed removal has unlinked need not be durable either.
    gone.push_back(file.name);
  }
  // What holds files of others stays.
  for (const std::string& name : gone) {
    (void)directory.RemoveEmptyParents(name);
  }
  TC_RETURN_IF_ERROR(directory.SyncParents(gone));
  TC_RETURN_IF_ERROR(directory.Sync());
  // Where locks do not reach another node, its save may have gone ahead.
  TC_RETURN_IF_ERROR(session.CheckTarget(directory));
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
  // Under the lock: what is about to go is what stands there.
  TC_ASSIGN_OR_RETURN(const Previous named, Named(target));
  TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(target));
  TC_RETURN_IF_ERROR(session.CheckTarget(directory));
  TC_RETURN_IF_ERROR(session.CheckStillOurs());
  RemovedCheckpoint out;
  TC_ASSIGN_OR_RETURN(out.removed, UnlinkAll(session, directory, named));
  session.End();
  // It stays where it holds files of others, is a mount point, or stands in a
  // directory that we may not read or write: the checkpoint is gone all the
  // same.
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
