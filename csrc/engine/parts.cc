#include "engine/parts.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "engine/merge_parts.h"
#include "engine/staged_files.h"
#include "engine/staging.h"
#include "format/names.h"
#include "os/probe.h"

namespace torch_ckpt {
namespace {

constexpr const char* kPartName = "part.json";    // until the commit point
constexpr const char* kIdentityName = "part_of";  // from the begin on
constexpr uint64_t kMaxPartBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxIdentityBytes = 128;
// Between another rank's renames and its manifest there are moments in which
// its files seem to be nobody's.
constexpr int kTries = 6;

std::string Identity(const ManifestPart& part) {
  return part.run_id + " " + std::to_string(part.sequence) + " " +
         std::to_string(part.world_size);
}

// The start of the names of all data files of a rank.
std::string ShardPrefix(int64_t rank) {
  const std::string name = ShardFileName(rank, 1, 1);
  return name.substr(0, name.find("model"));
}

// Data files in `names` that no part manifest names, and that are of no rank
// which is committing a part of the same save just now.
Result<std::vector<std::string>> StrayFiles(
    const Directory& target, const std::vector<std::string>& names,
    const std::vector<Manifest>& parts, const ManifestPart& own) {
  std::set<std::string_view> known;
  for (const Manifest& part : parts) {
    for (const ManifestFile& file : part.files) known.insert(file.name);
  }
  std::vector<std::string> live;
  for (const std::string& name : names) {
    const auto rank = RankOfPartStage(name);
    if (!rank || *rank == own.rank) continue;
    Result<Directory> staging = target.OpenDirectory(name);
    if (!staging.ok()) continue;  // removed meanwhile
    const Result<std::string> identity =
        staging->ReadFile(kIdentityName, kMaxIdentityBytes);
    if (identity.ok() && *identity == Identity(own)) {
      live.push_back(ShardPrefix(*rank));
    }
  }
  std::vector<std::string> stray;
  for (const std::string& name : names) {
    if (!name.ends_with(kDataSuffix) || known.contains(name)) continue;
    if (std::none_of(live.begin(), live.end(), [&](const std::string& prefix) {
          return name.starts_with(prefix);
        })) {
      stray.push_back(name);
    }
  }
  return stray;
}

// kConflict, naming it, for anything that a part of this save cannot stand
// beside.
Status CheckFresh(const Directory& target, const ManifestPart& own) {
  std::vector<std::string> stray;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    if (attempt > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 << attempt));
    }
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
    for (const std::string_view name :
         {kManifestName, kIndexName, kStageSuffix}) {
      if (!std::binary_search(names.begin(), names.end(), name)) continue;
      return Conflict("holds " + std::string(name) +
                      ": a save without collectives needs a directory without "
                      "a checkpoint")
          .WithFile(target.path());
    }
    TC_ASSIGN_OR_RETURN(const std::vector<Manifest> parts, ReadParts(target));
    for (const Manifest& part : parts) {
      if (part.part->rank != own.rank && part.part->SameSave(own)) continue;
      return Conflict(
                 "holds a part of " +
                 std::string(part.part->SameSave(own) ? "this" : "another") +
                 " save (" +
                 PartManifestName(part.part->rank, part.part->world_size) +
                 "): a save without collectives needs a directory without a "
                 "checkpoint")
          .WithFile(target.path());
    }
    TC_ASSIGN_OR_RETURN(stray, StrayFiles(target, names, parts, own));
    if (stray.empty()) return {};
  }
  return Conflict("holds " + stray[0] +
                  ": a save without collectives needs a directory without a "
                  "checkpoint")
      .WithFile(target.path());
}

// Undoes an uncommitted part and empties its staging directory, whose lock the
// caller holds.
Status UndoPart(const Directory& staging, const Directory& target) {
  Result<std::string> text = staging.ReadFile(kPartName, kMaxPartBytes);
  if (text.ok()) {
    // One that was cut short by a crash was followed by no rename.
    const Result<Manifest> manifest = ParseManifest(AsBytes(*text));
    if (manifest.ok()) {
      for (const ManifestFile& file : manifest->files) {
        TC_ASSIGN_OR_RETURN(const auto there,
                            staging.StatName(StagedName(file.name, file.id)));
        if (there) continue;  // not moved
        TC_RETURN_IF_ERROR(target.Unlink(file.name, /*missing_ok=*/true));
      }
      TC_RETURN_IF_ERROR(target.Sync());
    }
    // First, or the files that go next would seem to have moved.
    TC_RETURN_IF_ERROR(staging.Unlink(kPartName, true));
    TC_RETURN_IF_ERROR(staging.Sync());
  } else if (text.status().sys_errno() != ENOENT) {
    return text.status();
  }
  return EmptyDirectory(staging, kLockFileName);
}

// Undoes the part and removes its staging directory; the lock goes last.
Status RemoveStaging(DirectoryLock* lock, const Directory& target,
                     const std::string& name) {
  TC_RETURN_IF_ERROR(UndoPart(lock->directory(), target));
  const bool by_file = lock->by_file();
  if (by_file) lock->Release();  // its file is in the way
  Status removed = target.RemoveDirectory(name, true);
  // Another save of this rank has made it its own since.
  if (by_file && removed.sys_errno() == ENOTEMPTY) return {};
  return removed;
}

// Renames into T, where no such name may be.
Status MoveIn(const Directory& staging, const std::string& from,
              const Directory& target, const std::string& to) {
  Status status = staging.RenameNoReplace(from, target, to);
  if (status.kind() != ErrorKind::kUnsupported) return status;
  TC_ASSIGN_OR_RETURN(const auto there, target.StatName(to));
  if (there) return Conflict("exists already").WithFile(target.Join(to));
  return staging.Rename(from, target, to);
}

// A rename between two directories is durable when both are.
Status SyncBoth(const Directory& staging, const Directory& target) {
  TC_RETURN_IF_ERROR(staging.Sync());
  return target.Sync();
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
  if (target.ok()) (void)RemoveStaging(&lock_, *target, BaseName(path_));
}

Result<PartSession> BeginPart(const std::string& target,
                              const ManifestPart& part) {
  if (part.rank < 0 || part.rank >= part.world_size ||
      part.world_size > INT32_MAX || !IsId(part.run_id)) {
    return InvalidArgument("rank " + std::to_string(part.rank) + " of " +
                           std::to_string(part.world_size) + " in run '" +
                           part.run_id + "' is no part of a save");
  }
  PartSession session;
  TC_ASSIGN_OR_RETURN(session.target_, AbsolutePath(target));
  if (BaseName(session.target_).empty()) {
    return InvalidArgument("cannot be a checkpoint").WithFile(session.target_);
  }
  session.part_ = part;
  const std::string name = PartStageName(part.rank);
  session.path_ = session.target_ + "/" + name;
  TC_RETURN_IF_ERROR(Directory::CreateAll(session.target_));
  TC_ASSIGN_OR_RETURN(const Directory directory,
                      Directory::Open(session.target_));
  // Look before anything is made: a reader of a foreign directory must not see
  // our staging in it. One that is there may have files of a dead save in T.
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
  TC_RETURN_IF_ERROR(UndoPart(staging, directory));
  TC_RETURN_IF_ERROR(ProbeWrites(staging));
  TC_RETURN_IF_ERROR(CheckFresh(directory, part));
  session.save_id_ = NewId();
  TC_RETURN_IF_ERROR(staging.WriteFile(kIdentityName, Identity(part)));
  return session;
}

Result<Manifest> CommitPart(PartSession* session,
                            const CommitRequest& request) {
  const Directory& staging = session->directory();
  const ManifestPart& part = session->part_;
  TC_ASSIGN_OR_RETURN(const Directory target,
                      Directory::Open(session->target_));
  TC_ASSIGN_OR_RETURN(const Catalog catalog,
                      CatalogOfStaged(staging, request, BoxProof::kDisjoint));
  std::vector<CommitFile> files = request.files;
  TC_ASSIGN_OR_RETURN(
      CommitFile catalog_file,
      AddStagedCatalog(staging, PartCatalogName(part.rank, part.world_size),
                       catalog));
  files.push_back(std::move(catalog_file));
  Manifest manifest;
  manifest.save_id = session->save_id_;
  manifest.world_size = part.world_size;
  manifest.part = part;
  for (const CommitFile& file : files) {
    if (file.staged != StagedName(file.file.name, file.file.id)) {
      return InvalidArgument("is not staged under its name and id")
          .WithFile(file.staged);
    }
    manifest.files.push_back(file.file);
  }
  const std::string text = EncodeManifest(manifest);
  const Status readable = ParseManifest(AsBytes(text)).status();
  if (!readable.ok()) {
    return InvalidArgument("the files to commit make no valid manifest: " +
                           readable.ToString());
  }
  TC_RETURN_IF_ERROR(CheckFresh(target, part));
  TC_RETURN_IF_ERROR(staging.WriteFile(kPartName, text));
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));
  TC_RETURN_IF_ERROR(SyncName(target));
  for (const CommitFile& file : files) {
    TC_RETURN_IF_ERROR(MoveIn(staging, file.staged, target, file.file.name));
  }
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));
  TC_RETURN_IF_ERROR(MoveIn(staging, kPartName, target,
                            PartManifestName(part.rank, part.world_size)));
  TC_RETURN_IF_ERROR(SyncBoth(staging, target));  // the commit point
  TC_RETURN_IF_ERROR(
      RemoveStaging(&session->lock_, target, BaseName(session->path_)));
  session->lock_.Release();
  return manifest;
}

Result<bool> RemoveDeadParts(const Directory& target) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  bool acted = false;
  for (const std::string& name : names) {
    const auto rank = RankOfPartStage(name);
    if (!rank) continue;
    const std::string path = target.Join(name);
    TC_RETURN_IF_ERROR(RefuseLink(path));
    Result<DirectoryLock> lock = DirectoryLock::Acquire(path);
    if (!lock.ok()) {
      if (lock.status().sys_errno() == ENOENT) continue;  // just finished
      if (lock.status().kind() != ErrorKind::kConflict) return lock.status();
      return Conflict(
                 "a save without collectives into this directory is in "
                 "progress on rank " +
                 std::to_string(*rank) + " (" + lock.status().message() + ")")
          .WithFile(target.path());
    }
    TC_RETURN_IF_ERROR(RemoveStaging(&*lock, target, name));
    acted = true;
  }
  if (acted) TC_RETURN_IF_ERROR(target.Sync());
  return acted;
}

Result<bool> HasPartStaging(const Directory& target) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return RankOfPartStage(name).has_value();
  });
}

}  // namespace torch_ckpt
