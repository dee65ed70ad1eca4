#include "engine/commit/staging.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "base/bytes.h"
#include "engine/commit/each_file.h"
#include "engine/commit/journal.h"
#include "engine/commit/rank_parts.h"
#include "engine/open/committed.h"
#include "engine/open/read_dcp.h"
#include "engine/open/read_torch.h"
#include "format/names.h"
#include "os/path.h"
#include "os/probe.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMaxIdBytes = 64;
constexpr size_t kMaxFileNameBytes = 255;  // of all file systems in use
// How often a place is looked at while other saves come and go.
constexpr int kLooks = 5;

// Whether there is nothing at T, so that a directory can be renamed to it. A
// directory that is there is kept, even an empty one: somebody has chosen its
// mode and owner, and may stand in it.
Result<bool> IsAbsent(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const std::optional<FileInfo> info, StatPath(target));
  if (info) {
    if (info->is_directory) return false;
    return InvalidArgument("is not a directory").WithFile(target);
  }
  TC_ASSIGN_OR_RETURN(const auto entry, StatPathEntry(target));
  if (!entry) return true;
  // Else it has come to be between the two looks.
  if (entry->is_directory) return false;
  return InvalidArgument("is a symbolic link to nothing").WithFile(target);
}

// Where a save into `target` stages, as things stand now; without `path`.
Result<StagingPlace> LocatePlace(const std::string& target, bool beside) {
  StagingPlace place;
  TC_ASSIGN_OR_RETURN(place.target, AbsolutePath(target));
  if (BaseName(place.target).empty()) {
    return InvalidArgument("cannot be a checkpoint").WithFile(place.target);
  }
  if (beside) {
    place.fresh = true;
  } else {
    TC_ASSIGN_OR_RETURN(place.fresh, IsAbsent(place.target));
  }
  place.root =
      place.fresh ? PlaceBeside(place.target) : PlaceInside(place.target);
  return place;
}

// Checkpoints of others count: those of stock DCP, and weights as the Hub calls
// them.
Status RefuseExisting(const Directory& target) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  for (const std::string& name : names) {
    if (name == kManifestName || name == kIndexName || IsDcpFile(name) ||
        IsPartManifestName(name) || name.ends_with(kDataSuffix) ||
        IsTorchIndex(name) || HasTorchWeights({&name, 1})) {
      return Conflict("holds a checkpoint (" + name +
                      ") and overwrite is False; overwrite=True (--overwrite) "
                      "replaces one of torch_ckpt")
          .WithFile(target.path());
    }
  }
  return {};
}

// The place of a first save that died before T was filled by others.
Status RemoveStaleSibling(const std::string& target) {
  const std::string sibling = PlaceBeside(target);
  TC_ASSIGN_OR_RETURN(const auto info, StatPathEntry(sibling));
  if (!info) return {};
  TC_RETURN_IF_ERROR(RefuseLink(sibling));
  TC_ASSIGN_OR_RETURN(DirectoryLock lock, DirectoryLock::Acquire(sibling));
  TC_RETURN_IF_ERROR(SweepPlace(lock.directory()).status());
  return lock.Remove();
}

// Removes what can never be committed. What cannot go yet is no error.
Status Discard(const Directory& root, const std::string& name) {
  Status removed = root.RemoveTree(name, ForEachOf);
  const int error = removed.sys_errno();
  return error == ENOTEMPTY || error == EBUSY ? Status() : removed;
}

// Step 3 for one save. False where it does not have its name any more: it has
// committed just now, or another one has superseded it.
Result<bool> Supersede(const Directory& root, const std::string& id) {
  const std::string dead = DeadName(id);
  const Status renamed = root.Rename(id, root, dead);
  if (renamed.sys_errno() == ENOENT) return false;
  TC_RETURN_IF_ERROR(renamed);
  TC_RETURN_IF_ERROR(Discard(root, dead));
  return true;
}

// By an open, which network file systems answer from the server and not from
// what they remember.
Result<std::optional<FileInfo>> StatByOpen(const Directory& directory,
                                           const std::string& name) {
  const Result<File> file = directory.OpenFile(name, {});
  if (file.status().sys_errno() == ENOENT) return std::optional<FileInfo>();
  if (!file.ok()) return file.status();
  TC_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  return std::optional<FileInfo>(info);
}

// A save that is going on at the place.
Result<JoinedSave> JoinAt(const std::string& path) {
  TC_RETURN_IF_ERROR(RefuseLink(path));
  TC_ASSIGN_OR_RETURN(const Directory root, Directory::Open(path));
  TC_ASSIGN_OR_RETURN(const std::string id,
                      root.ReadFile(std::string(kSaveIdName), kMaxIdBytes,
                                    {.no_follow = true}));
  if (!IsId(id)) return Corrupt("is no save id").WithFile(root.path());
  TC_RETURN_IF_ERROR(root.OpenDirectory(id).status());
  return JoinedSave{root.Join(id), id};
}

}  // namespace

Status RefusePart(const std::string& target) {
  const auto check = [&]() -> Result<bool> {
    const Result<Directory> directory = Directory::Open(target);
    if (directory.ok()) {
      TC_ASSIGN_OR_RETURN(const auto above, FindAbove(*directory));
      return above.has_value();
    }
    // What is no directory the save itself refuses.
    const int error = directory.status().sys_errno();
    if (error != ENOENT && error != ENOTDIR) return directory.status();
    TC_ASSIGN_OR_RETURN(const Directory parent,
                        Directory::Open(ParentPath(target)));
    return HasFilesIn(parent, BaseName(target));
  };
  const Result<bool> part = check();
  // A damaged manifest names nothing for sure.
  if (part.status().kind() == ErrorKind::kCorrupt) return {};
  TC_RETURN_IF_ERROR(part.status());
  if (!*part) return {};
  return Conflict(
             "is a part of the checkpoint in the directory above it: save into "
             "another directory, or all of that checkpoint anew")
      .WithFile(target);
}

std::string PlaceBeside(const std::string& target) {
  const std::string parent = ParentPath(target), base = BaseName(target);
  std::string name = "." + base + std::string(kStageSuffix);
  if (name.size() > kMaxFileNameBytes) {
    // Twins only share a lock.
    name = ".";
    AppendHex(&name, Crc32c(0, base.data(), base.size()), 8);
    name += kStageSuffix;
  }
  return (parent == "/" ? "" : parent) + "/" + name;
}

std::string DeadName(const std::string& id) { return "dead-" + id; }

std::string PlaceInside(const std::string& target) {
  return target + "/" + std::string(kStageSuffix);
}

Status RefuseLink(const std::string& path) {
  TC_ASSIGN_OR_RETURN(const auto info, StatPathEntry(path));
  if (!info || !info->is_link) return {};
  return Corrupt("is a symbolic link; remove it if no save of yours made it")
      .WithFile(path);
}

Status EmptyDirectory(const Directory& directory, std::string_view keep) {
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names, directory.List());
  std::erase(names, keep);
  std::vector<char> left(names.size());
  TC_RETURN_IF_ERROR(ForEachFile(names.size(), [&](size_t i) {
    Status removed = directory.Unlink(names[i], /*missing_ok=*/true);
    left[i] = removed.sys_errno() == EISDIR || removed.sys_errno() == EPERM;
    return left[i] ? Status() : removed;
  }));
  for (size_t i = 0; i < names.size(); ++i) {
    if (!left[i]) continue;
    TC_RETURN_IF_ERROR(directory.RemoveTree(names[i], ForEachOf));
  }
  return {};
}

Result<bool> SweepPlace(const Directory& root) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, root.List());
  bool all = true;
  for (const std::string& name : names) {
    if (name == kLockFileName) continue;
    TC_ASSIGN_OR_RETURN(const auto info, root.StatEntry(name));
    const bool directory = info && info->is_directory;
    if (name == kCommittedName && directory) continue;
    if (IsId(name) && directory) {
      TC_ASSIGN_OR_RETURN(const bool superseded, Supersede(root, name));
      all = all && superseded;
    } else {
      TC_RETURN_IF_ERROR(Discard(root, name));
    }
  }
  return all;
}

Status CarryOutAndSweep(const Directory& root, const Directory& target,
                        Status* given_up) {
  for (int look = 0; look < kLooks; ++look) {
    TC_RETURN_IF_ERROR(CarryOutFound(root, target, given_up).status());
    TC_ASSIGN_OR_RETURN(const bool all, SweepPlace(root));
    // Else one of them may have committed meanwhile.
    if (all) break;
  }
  return {};
}

Status SaveSession::Enter() {
  TC_RETURN_IF_ERROR(RefuseLink(place_.root));
  Result<DirectoryLock> lock = DirectoryLock::Acquire(place_.root);
  if (!lock.ok()) {
    if (lock.status().kind() != ErrorKind::kConflict) return lock.status();
    return Conflict("another save to this path is in progress (" +
                    lock.status().message() + ")")
        .WithFile(place_.target);
  }
  lock_ = std::move(*lock);
  // One that has committed has made T, for which is looked again.
  if (place_.fresh) return SweepPlace(root()).status();
  TC_ASSIGN_OR_RETURN(const Directory target, Directory::Open(place_.target));
  Status given_up;
  TC_RETURN_IF_ERROR(
      CarryOutAndSweep(root(), target, overwrite_ ? &given_up : nullptr));
  if (!given_up.ok()) {
    warnings_.push_back(given_up.ToString() + "; it is given up now");
  }
  if (!overwrite_) TC_RETURN_IF_ERROR(RefuseExisting(target));
  previous_ = ReadPrevious(target);
  const Result<Previous>& previous = *previous_;
  if (previous.status().kind() == ErrorKind::kIo) return previous.status();
  if (previous.ok() && !previous->damage.ok()) {
    warnings_.push_back(previous->damage.ToString() +
                        "; of what stands there only the files go that are "
                        "called as those of our saves, or have an id of ours");
  }
  TC_RETURN_IF_ERROR(ReplacedOfOthers(target).status());
  return RemoveDeadParts(target).status();
}

Status SaveSession::NameInPlace() const {
  const std::string name(kSaveIdName), fresh = StagedName(name, save_id_);
  TC_ASSIGN_OR_RETURN(
      File file, root().OpenFile(fresh, {.write = true, .create_new = true}));
  TC_RETURN_IF_ERROR(file.WriteAll(AsBytes(save_id_), 0));
  // Not synced: whom it names does not outlive a crash either.
  TC_RETURN_IF_ERROR(file.Close());
  return root().Rename(fresh, root(), name);
}

Result<SaveSession> SaveSession::Begin(const std::string& target,
                                       bool overwrite, bool others,
                                       bool beside) {
  SaveSession session;
  session.overwrite_ = overwrite;
  session.others_ = others;
  TC_RETURN_IF_ERROR(RefusePart(target));
  TC_ASSIGN_OR_RETURN(session.place_, LocatePlace(target, beside));
  TC_RETURN_IF_ERROR(Directory::Create(session.place_.root));
  TC_RETURN_IF_ERROR(session.Enter());
  TC_ASSIGN_OR_RETURN(const StagingPlace again, LocatePlace(target, beside));
  if (again.root != session.place_.root) {
    return Status::Io(ESTALE, "looking for where to stage", target);
  }
  if (!again.fresh) TC_RETURN_IF_ERROR(RemoveStaleSibling(target));
  session.save_id_ = NewId();
  session.place_.path = session.place_.root + "/" + session.save_id_;
  TC_RETURN_IF_ERROR(session.root().MakeDirectory(session.save_id_));
  TC_ASSIGN_OR_RETURN(session.staging_,
                      session.root().OpenDirectory(session.save_id_));
  TC_RETURN_IF_ERROR(ProbeWrites(session.staging_));
  TC_RETURN_IF_ERROR(session.NameInPlace());
  // After the pointer: whoever commits in between has seen neither.
  if (!again.fresh) {
    TC_ASSIGN_OR_RETURN(const Directory into, Directory::Open(target));
    TC_ASSIGN_OR_RETURN(session.manifest_,
                        StatByOpen(into, std::string(kManifestName)));
  }
  return session;
}

Result<SaveSession> BeginSave(const std::string& target, bool overwrite,
                              bool others, bool beside) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  const std::string parent = ParentPath(absolute);
  TC_RETURN_IF_ERROR(Directory::CreateAll(parent));
  PlacePatience patience(parent);
  for (;;) {
    Result<SaveSession> session =
        SaveSession::Begin(absolute, overwrite, others, beside);
    const Status& last = session.status();
    if (!PlacePatience::Changed(last)) return session;
    if (!patience.Wait()) {
      return Conflict(
                 "its staging directory keeps changing: another save is in "
                 "progress (" +
                 last.ToString() + ")")
          .WithFile(absolute);
    }
  }
}

bool PlacePatience::Wait() {
  if (!patience_) {
    const Result<Directory> above = Directory::Open(parent_);
    const bool shared = above.ok() && IsShared(*above);
    patience_.emplace(shared ? kNamePatience : kPatience);
  }
  return patience_->Wait();
}

bool PlacePatience::Changed(const Status& status) {
  return status.sys_errno() == ENOENT || status.sys_errno() == ESTALE;
}

Status ExplainGone(Status status, const std::string& path) {
  if (!PlacePatience::Changed(status)) return status;
  const auto there = StatPathEntry(path);
  if (!there.ok() || *there) return status;
  return Conflict(
             "another save to this path has begun since, or this "
             "staging directory was removed (" +
             status.ToString() + ")")
      .WithFile(path);
}

Result<JoinedSave> JoinSave(const std::string& target,
                            std::chrono::milliseconds total) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  Patience patience(total);
  do {
    // Where it was when the coordinator looked: T may have been made since.
    for (const std::string& path :
         {PlaceInside(absolute), PlaceBeside(absolute)}) {
      Result<JoinedSave> joined = JoinAt(path);
      if (joined.ok()) return joined;
    }
  } while (patience.Wait());
  return Incomplete(
             "the staging directory that the coordinator made cannot be seen "
             "here: every rank must see the same file system under this path")
      .WithFile(absolute);
}

Result<bool> SaveSession::IsStillOurs() const {
  TC_ASSIGN_OR_RETURN(const std::string id,
                      root().ReadFile(std::string(kSaveIdName), kMaxIdBytes));
  TC_ASSIGN_OR_RETURN(const FileInfo held, staging_.Stat());
  TC_ASSIGN_OR_RETURN(const auto named, root().StatEntry(save_id_));
  TC_ASSIGN_OR_RETURN(const FileInfo place, root().Stat());
  TC_ASSIGN_OR_RETURN(const auto here, StatPathEntry(place_.root));
  return id == save_id_ && named && named->SameFile(held) && here &&
         here->SameFile(place);
}

Status SaveSession::CheckStillOurs() const {
  const Result<bool> ours = IsStillOurs();
  if (ours.ok() && *ours) return {};
  // Some file systems say ENOENT of what is open here and gone on the server.
  if (!ours.ok() && !PlacePatience::Changed(ours.status())) {
    return ours.status();
  }
  return Conflict(
             "another save to this path has begun since, or its "
             "staging directory was moved or replaced")
      .WithFile(place_.path);
}

Status SaveSession::CheckNotHidden(const NewFiles& files) const {
  if (!previous_) return {};
  TC_RETURN_IF_ERROR(previous_->status());
  const Result<Directory> target = Directory::Open(place_.target);
  Status checked = target.ok()
                       ? torch_ckpt::CheckNotHidden(*target, **previous_, files)
                       : target.status();
  // Removed by others meanwhile, of which the commit will hear.
  return checked.sys_errno() == ENOENT ? Status() : checked;
}

Status SaveSession::CheckTarget(const Directory& target) const {
  TC_ASSIGN_OR_RETURN(const auto now,
                      StatByOpen(target, std::string(kManifestName)));
  const bool same =
      now.has_value() == manifest_.has_value() &&
      (!now || (now->SameFile(*manifest_) && now->bytes == manifest_->bytes &&
                now->modified_ns == manifest_->modified_ns));
  if (same) return {};
  return Conflict("another save has committed into it since this one began")
      .WithFile(place_.target);
}

Result<std::vector<std::string>> SaveSession::ReplacedOfOthers(
    const Directory& target) const {
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      FindStockMetadata(target));
  if (names.empty()) return names;
  if (others_) {
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> all, target.List());
    std::erase_if(names, [&](const std::string& name) {
      return name != kStockMetadataNames[0];
    });
    std::copy_if(all.begin(), all.end(), std::back_inserter(names),
                 [](const std::string& name) {
                   return name != kStockMetadataNames[0] &&
                          IsStockMetadataName(name);
                 });
    return names;
  }
  return Conflict("holds a checkpoint of stock DCP (" + names[0] +
                  "), and could not be told from what is saved beside it; "
                  "save into another directory, or replace it with "
                  "overwrite=\"all\"")
      .WithFile(target.path());
}

SaveSession::~SaveSession() {
  if (!lock_.held()) return;
  // Past the commit point it stays, with its files, to be carried out; any
  // other leftover goes.
  const auto held = staging_.Stat();
  const auto named = root().StatEntry(std::string(kCommittedName));
  if (named.ok() && (!*named || (held.ok() && !(*named)->SameFile(*held)))) {
    End();
  }
}

void SaveSession::End() {
  if (!lock_.held()) return;
  if (!save_id_.empty()) {
    // By their names: a rename whose answer was lost may have made the
    // directory the checkpoint.
    const std::string name(kSaveIdName);
    (void)root().RemoveTree(save_id_, ForEachOf);
    const auto id = root().ReadFile(name, kMaxIdBytes, {.no_follow = true});
    if (id.ok() && *id == save_id_) (void)root().Unlink(name, true);
    (void)root().Unlink(StagedName(name, save_id_), true);
  }
  (void)lock_.Remove();
}

Status SaveSession::MoveInside() {
  SaveSession inside;
  inside.overwrite_ = overwrite_;
  inside.warnings_ = warnings_;
  inside.others_ = others_;
  inside.place_ = place_;
  inside.place_.root = PlaceInside(place_.target);
  inside.place_.path = inside.place_.root + "/" + save_id_;
  inside.place_.fresh = false;
  TC_RETURN_IF_ERROR(Directory::Create(inside.place_.root));
  TC_RETURN_IF_ERROR(inside.Enter());
  TC_ASSIGN_OR_RETURN(const Directory target, Directory::Open(place_.target));
  TC_RETURN_IF_ERROR(CheckTarget(target));  // none was there
  // No such name can be there: it is random.
  TC_RETURN_IF_ERROR(root().Rename(save_id_, inside.root(), save_id_));
  inside.save_id_ = save_id_;
  TC_ASSIGN_OR_RETURN(inside.staging_, inside.root().OpenDirectory(save_id_));
  TC_RETURN_IF_ERROR(inside.NameInPlace());
  // The commit that follows syncs the other end: a journal must not last where
  // this rename does not.
  TC_RETURN_IF_ERROR(root().Sync());
  std::swap(*this, inside);
  inside.End();
  return {};
}

}  // namespace torch_ckpt
