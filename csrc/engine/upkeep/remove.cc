#include "engine/upkeep/remove.h"

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit/each_file.h"
#include "engine/commit/journal.h"
#include "engine/commit/previous.h"
#include "engine/commit/staging.h"
#include "engine/open/committed.h"
#include "format/names.h"
#include "os/directory.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

Status HoldsNone(const std::string& path) {
  return Incomplete("holds no checkpoint of torch_ckpt: there is no " +
                    std::string(kManifestName))
      .WithFile(path);
}

bool IsThere(const Previous& named) {
  return named.manifest || !named.part_manifests.empty();
}

// The journal that stands, or one of no files and no removes. kIncomplete where
// there is nothing to remove.
Result<Journal> LookBefore(const std::string& path) {
  const Result<Directory> directory = Directory::Open(path);
  if (directory.status().sys_errno() == ENOENT) {
    return Incomplete("there is no such directory").WithFile(path);
  }
  TC_RETURN_IF_ERROR(directory.status());
  const Result<Directory> place =
      directory->OpenDirectory(std::string(kStageSuffix));
  if (place.ok()) {
    TC_ASSIGN_OR_RETURN(const auto found, FindJournal(*place));
    if (found) {
      Result<Journal> journal = ParseJournal(AsBytes(found->text));
      return journal.ok() ? std::move(journal).value() : Journal();
    }
  }
  TC_ASSIGN_OR_RETURN(const Previous named, ReadPrevious(*directory));
  if (!IsThere(named)) return HoldsNone(path);
  return Journal();
}

// What is there under the names, but for directories, and for what lies below
// what is none by now.
Result<std::vector<std::string>> Existing(const Directory& directory,
                                          const Previous& named) {
  std::vector<std::string> names;
  for (const ManifestFile& file : named.files) names.push_back(file.name);
  names.insert(names.end(), named.part_manifests.begin(),
               named.part_manifests.end());
  std::vector<char> exists(names.size());
  TC_RETURN_IF_ERROR(ForEachFile(names.size(), [&](size_t i) -> Status {
    const auto info = directory.StatEntry(names[i]);
    const int error = info.status().sys_errno();
    if (error == ENOTDIR || error == ELOOP) return {};
    TC_RETURN_IF_ERROR(info.status());
    exists[i] = *info && !(*info)->is_directory;
    return {};
  }));
  std::vector<std::string> existing;
  for (size_t i = 0; i < names.size(); ++i) {
    if (exists[i]) existing.push_back(std::move(names[i]));
  }
  return existing;
}

// Step 2. The names of what went.
Result<std::vector<std::string>> CommitNothing(const SaveSession& session,
                                               const Directory& directory,
                                               const Previous& named) {
  Journal journal;
  journal.manifest.save_id = session.save_id();
  TC_ASSIGN_OR_RETURN(journal.removes, Existing(directory, named));
  std::vector<std::string> going = journal.removes;
  if (named.manifest) going.emplace_back(kManifestName);
  TC_RETURN_IF_ERROR(WriteJournal(
      session.root(), session.directory(), directory, journal, [&]() -> Status {
        TC_RETURN_IF_ERROR(ForEachFile(going.size(), [&](size_t i) {
          return directory.CheckReplaceable(going[i]);
        }));
        // Where locks do not reach another node, its save may have gone ahead.
        TC_RETURN_IF_ERROR(session.CheckTarget(directory));
        return session.CheckStillOurs();
      }));
  TC_RETURN_IF_ERROR(
      CarryOut(session.root(), session.directory(), directory, journal));
  return going;
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
  // Before the lock, which would make a place to stage in.
  TC_ASSIGN_OR_RETURN(Journal before, LookBefore(target));
  TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(target, true, true));
  // Under the lock: what is about to go is what stands there.
  TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(target));
  TC_ASSIGN_OR_RETURN(const Previous named, ReadPrevious(directory));
  RemovedCheckpoint out;
  out.warnings = session.TakeWarnings();
  if (IsThere(named)) {
    TC_ASSIGN_OR_RETURN(out.removed, CommitNothing(session, directory, named));
  } else if (before.IsRemoval() && !before.manifest.save_id.empty()) {
    out.removed = std::move(before.removes);  // it has just been carried out
    out.removed.emplace_back(kManifestName);
  } else {
    return HoldsNone(target);
  }
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
