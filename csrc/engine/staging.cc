#include "engine/staging.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <optional>

#include "engine/journal.h"
#include "engine/parts.h"
#include "format/names.h"
#include "os/probe.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMaxIdBytes = 64;
constexpr int kLockTries = 8;
constexpr size_t kMaxFileNameBytes = 255;  // of all file systems in use

std::string SiblingPath(const std::string& target) {
  const std::string parent = ParentPath(target);
  return (parent == "/" ? "" : parent) + "/" + SiblingStageName(target);
}

// Absent (nullopt), or what stat says of the path itself.
Result<std::optional<FileInfo>> StatPath(const std::string& path) {
  Result<Directory> parent = Directory::Open(ParentPath(path));
  if (!parent.ok()) {
    if (parent.status().sys_errno() == ENOENT) {
      return std::optional<FileInfo>();
    }
    return parent.status();
  }
  return parent->StatName(BaseName(path));
}

// Whether there is nothing at T, so that a sibling can be renamed to it. A
// directory that is there is kept, even an empty one: somebody has chosen its
// mode and owner, and may stand in it.
Result<bool> IsAbsent(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatPath(target));
  if (info) {
    if (info->is_directory) return false;
    return InvalidArgument("is not a directory").WithFile(target);
  }
  const Result<Directory> parent = Directory::Open(ParentPath(target));
  if (!parent.ok()) return true;
  TC_ASSIGN_OR_RETURN(const bool link, parent->IsLink(BaseName(target)));
  if (!link) return true;
  return InvalidArgument("is a symbolic link to nothing").WithFile(target);
}

Status RefuseExisting(const Directory& target) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  for (const std::string& name : names) {
    if (name == kManifestName || name == kIndexName ||
        IsPartManifestName(name) || name.ends_with(kDataSuffix)) {
      return Conflict("holds a checkpoint (" + name +
                      ") and overwrite is False")
          .WithFile(target.path());
    }
  }
  return {};
}

// A sibling left by a first save that died before T was filled by others.
Status RemoveStaleSibling(const std::string& target) {
  const std::string sibling = SiblingPath(target);
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatPath(sibling));
  if (!info) return {};
  TC_RETURN_IF_ERROR(RefuseLink(sibling));
  Result<DirectoryLock> lock = DirectoryLock::Acquire(sibling);
  if (!lock.ok()) return lock.status();
  TC_RETURN_IF_ERROR(EmptyDirectory(lock->directory()));
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(target)));
  return parent.RemoveDirectory(BaseName(sibling), true);
}

}  // namespace

std::string SiblingStageName(const std::string& target) {
  const std::string base = BaseName(target);
  std::string name = "." + base + std::string(kStageSuffix);
  if (name.size() <= kMaxFileNameBytes) return name;
  // Twins only share a lock.
  std::array<char, 9> crc;
  std::snprintf(crc.data(), crc.size(), "%08x",
                Crc32c(0, base.data(), base.size()));
  return "." + std::string(crc.data()) + std::string(kStageSuffix);
}

Result<StagingPlace> LocateStaging(const std::string& target) {
  StagingPlace place;
  TC_ASSIGN_OR_RETURN(place.target, AbsolutePath(target));
  if (BaseName(place.target).empty()) {
    return InvalidArgument("cannot be a checkpoint").WithFile(place.target);
  }
  TC_ASSIGN_OR_RETURN(place.fresh, IsAbsent(place.target));
  place.path = place.fresh ? SiblingPath(place.target)
                           : place.target + "/" + std::string(kStageSuffix);
  return place;
}

Status RefuseLink(const std::string& path) {
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(path)));
  TC_ASSIGN_OR_RETURN(const bool link, parent.IsLink(BaseName(path)));
  if (!link) return {};
  return Corrupt("is a symbolic link; remove it if no save of yours made it")
      .WithFile(path);
}

Status EmptyDirectory(const Directory& directory, std::string_view keep) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  for (const std::string& name : names) {
    if (name == keep) continue;
    TC_ASSIGN_OR_RETURN(const bool link, directory.IsLink(name));
    TC_ASSIGN_OR_RETURN(const auto info, directory.StatName(name));
    if (!link && info && info->is_directory) {
      TC_ASSIGN_OR_RETURN(const Directory inner, directory.OpenDirectory(name));
      TC_ASSIGN_OR_RETURN(const auto files, inner.List());
      for (const std::string& file : files) {
        TC_RETURN_IF_ERROR(inner.Unlink(file, true));
      }
      TC_RETURN_IF_ERROR(directory.RemoveDirectory(name, true));
    } else {
      TC_RETURN_IF_ERROR(directory.Unlink(name, true));
    }
  }
  return {};
}

Result<SaveSession> BeginSave(const std::string& target, bool overwrite) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  TC_RETURN_IF_ERROR(Directory::CreateAll(ParentPath(absolute)));
  // A commit may move or remove the directory between our look and our lock:
  // then look again.
  for (int attempt = 0; attempt < kLockTries; ++attempt) {
    TC_ASSIGN_OR_RETURN(StagingPlace place, LocateStaging(absolute));
    TC_RETURN_IF_ERROR(Directory::Create(place.path));
    TC_RETURN_IF_ERROR(RefuseLink(place.path));
    Result<DirectoryLock> lock = DirectoryLock::Acquire(place.path);
    if (!lock.ok()) {
      if (lock.status().sys_errno() == ENOENT) continue;
      if (lock.status().kind() == ErrorKind::kConflict) {
        return Conflict("another save into this directory is in progress (" +
                        lock.status().message() + ")")
            .WithFile(absolute);
      }
      return lock.status();
    }
    TC_ASSIGN_OR_RETURN(const FileInfo held, lock->directory().Stat());
    TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> now,
                        StatPath(place.path));
    TC_ASSIGN_OR_RETURN(const StagingPlace again, LocateStaging(absolute));
    if (!now || !now->SameFile(held) || again.path != place.path) continue;
    SaveSession session;
    session.place_ = place;
    session.overwrite_ = overwrite;
    session.lock_ = std::move(*lock);
    const Directory& staging = session.directory();
    if (!place.fresh) {
      TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(absolute));
      TC_RETURN_IF_ERROR(ReplayJournal(staging, directory));
      if (!overwrite) TC_RETURN_IF_ERROR(RefuseExisting(directory));
      TC_RETURN_IF_ERROR(RemoveDeadParts(directory).status());
      TC_RETURN_IF_ERROR(RemoveStaleSibling(absolute));
    }
    TC_RETURN_IF_ERROR(EmptyDirectory(staging, kLockFileName));
    TC_RETURN_IF_ERROR(ProbeWrites(staging));
    session.save_id_ = NewId();
    TC_RETURN_IF_ERROR(
        staging.WriteFile(std::string(kSaveIdName), session.save_id_));
    return session;
  }
  return Conflict(
             "its staging directory keeps changing: another save is in "
             "progress")
      .WithFile(absolute);
}

Result<JoinedSave> JoinSave(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const StagingPlace place, LocateStaging(target));
  // Where it was when the coordinator looked: T may have been made since.
  for (const std::string& path :
       {place.target + "/" + std::string(kStageSuffix),
        SiblingPath(place.target)}) {
    Result<Directory> staging = Directory::Open(path);
    if (!staging.ok()) continue;
    Result<std::string> id =
        staging->ReadFile(std::string(kSaveIdName), kMaxIdBytes);
    if (id.ok() && IsId(*id)) return JoinedSave{path, *id};
  }
  return Incomplete(
             "the staging directory that the coordinator made cannot be seen "
             "here: every rank must see the same file system under this path")
      .WithFile(place.target);
}

SaveSession::~SaveSession() {
  if (!lock_.held()) return;
  // Not committed. A journal past the commit point stays for the replay; any
  // other leftover goes now, or, where that fails, with the next save.
  Result<std::optional<FileInfo>> journal =
      directory().StatName(std::string(kJournalName));
  if (!journal.ok() || *journal) return;
  // Nor what is at its place no longer: a rename whose answer was lost may
  // have made it the checkpoint.
  const Result<std::optional<FileInfo>> now = StatPath(place_.path);
  const Result<FileInfo> held = directory().Stat();
  if (!now.ok() || !*now || !held.ok() || !(*now)->SameFile(*held)) return;
  (void)RemoveStaging();
}

Status SaveSession::RemoveStaging() {
  TC_RETURN_IF_ERROR(EmptyDirectory(directory(), kLockFileName));
  const bool by_file = lock_.by_file();
  if (by_file) lock_.Release();  // its file is in the way
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(place_.path)));
  Status removed = parent.RemoveDirectory(BaseName(place_.path), true);
  // Another save has made it its own since.
  if (by_file && removed.sys_errno() == ENOTEMPTY) return {};
  return removed;
}

void SaveSession::Finish() { lock_.Release(); }

Status SaveSession::MoveInside() {
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(place_.path)));
  TC_ASSIGN_OR_RETURN(const Directory target, Directory::Open(place_.target));
  const std::string name(kStageSuffix);
  // The lock is on the directory itself and moves with it.
  Status moved = parent.RenameNoReplace(BaseName(place_.path), target, name);
  if (moved.kind() == ErrorKind::kConflict) {
    return Conflict("another save into this directory is in progress")
        .WithFile(place_.target);
  }
  // The commit that follows syncs both ends.
  TC_RETURN_IF_ERROR(std::move(moved));
  place_.path = place_.target + "/" + name;
  place_.fresh = false;
  return overwrite_ ? Status() : RefuseExisting(target);
}

}  // namespace torch_ckpt
