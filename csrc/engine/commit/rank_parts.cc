#include "engine/commit/rank_parts.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <vector>

#include "engine/commit/staged_files.h"
#include "engine/commit/staging.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/read_dcp.h"
#include "format/names.h"
#include "os/path.h"
#include "os/probe.h"

namespace torch_ckpt {
namespace {

Status NotFresh(const Directory& target, const std::string& what) {
  return Conflict("holds " + what +
                  ": a save without collectives needs a directory without a "
                  "checkpoint")
      .WithFile(target.path());
}

// kConflict, naming it, for anything that a part of this save cannot stand
// beside: another save's, or a data file that is of no rank which has committed
// its part or is at it. A rank's staging directory is there before its files
// are and until its manifest is: so the files are looked for first, then the
// staging directories, then the manifests.
Status CheckFresh(const Directory& target, const ManifestPart& own) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> files, target.List());
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> stages, target.List());
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> manifests, target.List());
  for (const std::string_view name :
       {kManifestName, kIndexName, kStageSuffix}) {
    if (std::binary_search(files.begin(), files.end(), name)) {
      return NotFresh(target, std::string(name));
    }
  }
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> of_others,
                      FindStockMetadata(target));
  if (!of_others.empty()) return NotFresh(target, of_others[0]);
  std::set<int64_t> ranks;
  for (const std::string& name : stages) {
    if (const auto rank = RankOfPartStage(name)) ranks.insert(*rank);
  }
  bool read = false;
  for (const std::string& name : manifests) {
    if (!IsPartManifestName(name)) continue;
    const int64_t rank = *RankOfFile(name);
    if (rank == own.rank) return NotFresh(target, name);
    ranks.insert(rank);
    if (read) continue;  // who committed that one has compared the others
    TC_ASSIGN_OR_RETURN(const Manifest part, ReadPart(target, name));
    read = true;
    if (!part.part || !part.part->SameSave(own)) {
      return NotFresh(target, "a part of another save (" + name + ")");
    }
  }
  ranks.erase(own.rank);
  for (const std::string& name : files) {
    const auto rank = RankOfFile(name);
    const bool known = rank && ranks.contains(*rank);
    if (rank == own.rank || (name.ends_with(kDataSuffix) && !known)) {
      return NotFresh(target, name);
    }
  }
  return {};
}

// A rename between two directories is durable when both are.
Status SyncBoth(const Directory& staging, const Directory& target) {
  TC_RETURN_IF_ERROR(staging.Sync());
  return target.Sync();
}

// Removes the staging directory of a part, whose lock the caller holds and
// which goes last.
Status RemoveStaging(DirectoryLock* lock) {
  TC_RETURN_IF_ERROR(EmptyDirectory(lock->directory(), kLockFileName));
  return lock->Remove();
}

// Removes the files of a rank from T, where its part was not committed. The
// caller holds the lock on its staging directory.
Status RemoveFiles(const Directory& staging, const Directory& target,
                   int64_t rank) {
  // What a process that was killed has renamed counts once it is durable.
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> staged, staging.List());
  const bool committed =
      std::any_of(names.begin(), names.end(), [&](const std::string& name) {
        return IsPartManifestName(name) && RankOfFile(name) == rank;
      });
  if (committed) return {};
  bool unlinked = false;
  for (const std::string& name : names) {
    if (RankOfFile(name) != rank) continue;
    // Somebody else's, where ours has not moved yet: a link and an unlink may
    // be the move, so that it has both names in between.
    const auto ours =
        std::find_if(staged.begin(), staged.end(), [&](const std::string& own) {
          return own.starts_with(name + ".") &&
                 IsId(std::string_view(own).substr(name.size() + 1));
        });
    if (ours != staged.end()) {
      TC_ASSIGN_OR_RETURN(const auto moving, staging.StatEntry(*ours));
      TC_ASSIGN_OR_RETURN(const auto there, target.StatEntry(name));
      if (!moving || !there || !there->SameFile(*moving)) continue;
    }
    TC_RETURN_IF_ERROR(target.Unlink(name, /*missing_ok=*/true));
    unlinked = true;
  }
  return unlinked ? target.Sync() : Status();
}

Status RemovePart(DirectoryLock* lock, const Directory& target, int64_t rank) {
  TC_RETURN_IF_ERROR(RemoveFiles(lock->directory(), target, rank));
  return RemoveStaging(lock);
}

// Whichever rank has made T, its name must be durable before any rank commits.
Status SyncName(const Directory& target) {
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(target.path())));
  TC_ASSIGN_OR_RETURN(const FileInfo of_parent, parent.Stat());
  TC_ASSIGN_OR_RETURN(const FileInfo of_target, target.Stat());
  return of_parent.device == of_target.device ? parent.Sync() : Status();
}

}  // namespace

PartSession::~PartSession() {
  if (!lock_.held()) return;
  // What cannot be removed now is found by the next save of this rank, or by
  // recover.
  const Result<Directory> target = Directory::Open(target_);
  if (target.ok()) (void)RemovePart(&lock_, *target, part_.rank);
}

Result<PartSession> BeginPart(const std::string& target,
                              const ManifestPart& part) {
  if (part.rank < 0 || part.rank >= part.world_size ||
      part.world_size > INT32_MAX || !IsId(part.run_id)) {
    return InvalidArgument("rank " + std::to_string(part.rank) + " of " +
                           std::to_string(part.world_size) + " in run '" +
                           part.run_id + "' is no part of a save");
  }
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  if (BaseName(absolute).empty()) {
    return InvalidArgument("cannot be a checkpoint").WithFile(absolute);
  }
  TC_RETURN_IF_ERROR(Directory::CreateAll(absolute));
  PlacePatience patience(absolute);
  for (;;) {
    Result<PartSession> session = PartSession::Begin(absolute, part);
    if (!PlacePatience::Changed(session.status()) || !patience.Wait()) {
      return session;
    }
  }
}

Result<PartSession> PartSession::Begin(const std::string& target,
                                       const ManifestPart& part) {
  TC_RETURN_IF_ERROR(RefusePart(target));
  PartSession session;
  session.target_ = target;
  session.part_ = part;
  const std::string name = PartStageName(part.rank);
  session.path_ = session.target_ + "/" + name;
  TC_ASSIGN_OR_RETURN(const Directory directory,
                      Directory::Open(session.target_));
  // Look before anything is made: a reader of a foreign directory must not see
  // our staging in it, and what is named as our files would be taken for them.
  TC_ASSIGN_OR_RETURN(const auto left, directory.StatName(name));
  if (!left) TC_RETURN_IF_ERROR(CheckFresh(directory, part));
  TC_RETURN_IF_ERROR(Directory::Create(session.path_));
  TC_RETURN_IF_ERROR(RefuseLink(session.path_));
  Result<DirectoryLock> lock = DirectoryLock::Acquire(session.path_);
  if (!lock.ok()) {
    if (lock.status().kind() != ErrorKind::kConflict) return lock.status();
    return Conflict("another save of rank " + std::to_string(part.rank) +
                    " into this directory is in progress (" +
                    lock.status().message() + ")")
        .WithFile(session.target_);
  }
  session.lock_ = std::move(*lock);
  const Directory& staging = session.directory();
  TC_RETURN_IF_ERROR(RemoveFiles(staging, directory, part.rank));
  TC_RETURN_IF_ERROR(EmptyDirectory(staging, kLockFileName));
  TC_RETURN_IF_ERROR(ProbeWrites(staging));
  TC_RETURN_IF_ERROR(CheckFresh(directory, part));
  if (part.rank == 0) {
    TC_RETURN_IF_ERROR(RemoveDeadParts(directory, part.world_size).status());
  }
  session.save_id_ = NewId();
  return session;
}

Result<Manifest> CommitPart(PartSession* session,
                            const CommitRequest& request) {
  const Directory& staging = session->directory();
  const ManifestPart& part = session->part_;
  TC_ASSIGN_OR_RETURN(const Directory target,
                      Directory::Open(session->target_));
  TC_ASSIGN_OR_RETURN(const CatalogBuilder catalog,
                      CatalogOfStaged(staging, request, BoxProof::kDisjoint));
  std::vector<StagedFile> files = request.files;
  TC_ASSIGN_OR_RETURN(
      StagedFile catalog_file,
      AddStagedCatalog(staging, PartCatalogName(part.rank, part.world_size),
                       catalog, files));
  files.push_back(std::move(catalog_file));
  Manifest manifest;
  manifest.save_id = session->save_id_;
  manifest.world_size = part.world_size;
  manifest.part = part;
  manifest.metadata = request.metadata;
  for (const StagedFile& file : files) {
    if (RankOfFile(file.name) != part.rank) {
      return InvalidArgument("is not named after its rank").WithFile(file.name);
    }
    manifest.files.push_back(file);
  }
  const std::string text = EncodeManifest(manifest);
  const Status readable = ParseManifest(AsBytes(text)).status();
  if (!readable.ok()) {
    return InvalidArgument("the files to commit make no valid manifest: " +
                           readable.ToString());
  }
  TC_RETURN_IF_ERROR(CheckFresh(target, part));
  const std::string name = PartManifestName(part.rank, part.world_size);
  TC_RETURN_IF_ERROR(staging.WriteFile(name, text));
  // The staging directory must be there for as long as files without a
  // manifest are.
  TC_RETURN_IF_ERROR(target.Sync());
  TC_RETURN_IF_ERROR(SyncName(target));
  for (const StagedFile& file : files) {
    TC_RETURN_IF_ERROR(staging.RenameNoReplace(file.staged, target, file.name));
  }
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));
  TC_RETURN_IF_ERROR(staging.RenameNoReplace(name, target, name));
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));  // the commit point
  // What cannot be removed now is removed by the next save or by recover.
  (void)RemoveStaging(&session->lock_);
  session->lock_.Release();
  return manifest;
}

Result<bool> RemoveDeadParts(const Directory& target, int64_t first) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  bool acted = false;
  for (const std::string& name : names) {
    const auto rank = RankOfPartStage(name);
    if (!rank || *rank < first) continue;
    const std::string path = target.Join(name);
    TC_RETURN_IF_ERROR(RefuseLink(path));
    Result<DirectoryLock> lock = DirectoryLock::Acquire(path);
    if (!lock.ok()) {
      const int error = lock.status().sys_errno();
      if (error == ENOENT || error == ESTALE) continue;  // just finished
      if (lock.status().kind() != ErrorKind::kConflict) return lock.status();
      return Conflict(
                 "a save without collectives into this directory is in "
                 "progress on rank " +
                 std::to_string(*rank) + " (" + lock.status().message() + ")")
          .WithFile(target.path());
    }
    TC_RETURN_IF_ERROR(RemovePart(&*lock, target, *rank));
    acted = true;
  }
  if (acted) TC_RETURN_IF_ERROR(target.Sync());
  return acted;
}

}  // namespace torch_ckpt
