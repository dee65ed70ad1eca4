#include "engine/commit/journal.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/commit/each_file.h"
#include "engine/commit/staging.h"
#include "engine/open/committed.h"
#include "engine/open/file_set.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr int kTries = 3;  // at a name that others are clearing too

Status Superseded(const Directory& place) {
  return Conflict(
             "another save into this directory has begun since, and this one "
             "can no longer be committed")
      .WithFile(place.path());
}

std::string GoneName(const Journal& journal) {
  return "gone." + journal.manifest.save_id;
}

// The next manifest, in staging.
std::string NextManifest(const Journal& journal) {
  return StagedName(kManifestName, journal.manifest.save_id);
}

// What stands in T; nullopt where that is no manifest.
Result<std::optional<Manifest>> Standing(const Directory& target) {
  const Result<std::string> text =
      target.ReadFile(std::string(kManifestName), kMaxManifestBytes);
  if (text.status().sys_errno() == ENOENT) return std::optional<Manifest>();
  TC_RETURN_IF_ERROR(text.status());
  Result<Manifest> manifest = ParseManifest(AsBytes(*text));
  if (!manifest.ok()) return std::optional<Manifest>();
  return std::optional<Manifest>(std::move(manifest).value());
}

// What says that the files of a journal are not there, or are not they.
bool IsBroken(const Status& status) {
  return status.kind() == ErrorKind::kIncomplete ||
         status.kind() == ErrorKind::kCorrupt;
}

// Not owned.
std::shared_ptr<const Directory> Borrow(const Directory& directory) {
  return {std::shared_ptr<void>(), &directory};
}

// Step 3b. `own`: this process has looked at its files, and what is still in
// staging is what it has seen.
Status Prove(const Directory& staging, const Directory& target,
             const Journal& journal, bool own) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, staging.List());
  const auto staged = [&](const std::string& name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  FileList list{Borrow(target), journal.manifest.files};
  list.staging = Borrow(staging);
  for (const JournalRename& rename : journal.renames) {
    list.staged[rename.to] = rename.from;
  }
  std::vector<uint32_t> doubtful;
  for (uint32_t f = 0; f < list.files.size(); ++f) {
    const auto from = list.staged.find(list.files[f].name);
    const bool seen = from == list.staged.end() || staged(from->second);
    if (!own || !seen) doubtful.push_back(f);
  }
  const FileSet files(std::move(list));
  TC_RETURN_IF_ERROR(ForEachFile(
      doubtful.size(),
      [&](size_t i) { return files.OpenFile(doubtful[i]).status(); },
      kSeveral));
  if (journal.IsRemoval()) return {};
  const std::string next = NextManifest(journal);
  if (own && staged(next)) return {};
  std::optional<Manifest> manifest;
  const Result<std::string> text =
      staging.ReadFile(next, kMaxManifestBytes, {.no_follow = true});
  if (text.ok()) {
    Result<Manifest> parsed = ParseManifest(AsBytes(*text));
    if (!parsed.ok()) return parsed.status().WithFile(staging.Join(next));
    manifest = std::move(parsed).value();
  } else if (PlacePatience::Changed(text.status())) {
    TC_ASSIGN_OR_RETURN(manifest, Standing(target));
  } else {
    return text.status();
  }
  if (manifest && manifest->save_id == journal.manifest.save_id) return {};
  return Incomplete("is missing").WithFile(staging.Join(next));
}

// Takes a file out of T. Whether it may have been there, or was taken by
// another replay, and not what is a directory by now or lies below what is
// none.
Result<bool> TakeAway(const Directory& target, const std::string& name,
                      const Directory& gone, size_t number) {
  const auto no_file = [](int error) {
    return error == ENOTDIR || error == ELOOP;
  };
  const auto info = target.StatEntry(name);
  if (no_file(info.status().sys_errno())) return false;
  TC_RETURN_IF_ERROR(info.status());
  if (*info && (*info)->is_directory) return false;
  Status moved = target.Rename(name, gone, std::to_string(number));
  // Where even a name needs space.
  if (moved.sys_errno() == ENOSPC || moved.sys_errno() == EDQUOT) {
    moved = target.Unlink(name, /*missing_ok=*/true);
  }
  if (no_file(moved.sys_errno())) return false;
  if (!moved.ok() && !PlacePatience::Changed(moved)) return moved;
  return true;
}

// Step 3c; also the manifest, of a removal. The names that are gone.
Result<std::vector<std::string>> TakeAwayAll(const Directory& gone,
                                             const Directory& target,
                                             const Journal& journal, bool own) {
  std::vector<std::string> names = journal.removes, removed;
  // Another save may have committed right before the journal: who has written
  // that hears of no conflict then. Whoever finds it later cannot know.
  if (own) {
    TC_ASSIGN_OR_RETURN(const auto standing, Standing(target));
    std::set<std::string> known(names.begin(), names.end());
    for (const ManifestFile& file : journal.manifest.files) {
      known.insert(file.name);
    }
    if (standing && standing->save_id != journal.manifest.save_id) {
      for (const ManifestFile& file : standing->files) {
        if (known.insert(file.name).second) names.push_back(file.name);
      }
    }
  }
  // What files are about to come to stays.
  std::set<std::string, std::less<>> needed;
  for (const JournalRename& rename : journal.renames) {
    needed.emplace(SubdirectoryOf(rename.to));
  }
  const size_t files = names.size();
  if (journal.IsRemoval()) names.emplace_back(kManifestName);
  std::vector<char> count(names.size());
  const auto take_away = [&](size_t i) -> Status {
    TC_ASSIGN_OR_RETURN(const bool counts, TakeAway(target, names[i], gone, i));
    count[i] = counts;
    // What holds others' files stays.
    if (counts && !needed.contains(SubdirectoryOf(names[i]))) {
      (void)target.RemoveEmptyParents(names[i]);
    }
    return {};
  };
  TC_RETURN_IF_ERROR(ForEachFile(files, take_away));
  // The manifest last: without it nobody knows the other files.
  if (files < names.size()) TC_RETURN_IF_ERROR(take_away(files));
  for (size_t i = 0; i < names.size(); ++i) {
    if (count[i]) removed.push_back(std::move(names[i]));
  }
  return removed;
}

// Renames a file of staging into T. False where it is not there: then another
// replay has done it, or the directory is no more.
Result<bool> Move(const Directory& staging, const std::string& from,
                  const Directory& target, const std::string& to) {
  Status moved = staging.Rename(from, target, to);
  if (PlacePatience::Changed(moved) && to.find('/') != to.npos) {
    // A removal beside this one may have found its directory empty.
    TC_RETURN_IF_ERROR(target.MakeParents({to}));
    moved = staging.Rename(from, target, to);
  }
  if (PlacePatience::Changed(moved)) return false;
  TC_RETURN_IF_ERROR(std::move(moved));
  return true;
}

// Step 3d. Whether all were moved here and now.
Result<bool> MoveAll(const Directory& staging, const Directory& target,
                     const Journal& journal) {
  std::vector<std::string> below;  // subdirectories of the target
  for (const JournalRename& rename : journal.renames) {
    if (rename.to.find('/') != rename.to.npos) below.push_back(rename.to);
  }
  if (!below.empty()) {
    TC_RETURN_IF_ERROR(target.MakeParents(below));
    // Durable before staging gives up a file that goes there.
    TC_RETURN_IF_ERROR(target.SyncParents(below));
    TC_RETURN_IF_ERROR(target.Sync());
  }
  std::atomic<bool> all = true;
  TC_RETURN_IF_ERROR(
      ForEachFile(journal.renames.size(), [&](size_t i) -> Status {
        const JournalRename& rename = journal.renames[i];
        TC_ASSIGN_OR_RETURN(const bool moved,
                            Move(staging, rename.from, target, rename.to));
        if (!moved) all = false;
        return {};
      }));
  if (!journal.IsRemoval()) {
    TC_ASSIGN_OR_RETURN(const bool moved,
                        Move(staging, NextManifest(journal), target,
                             std::string(kManifestName)));
    if (!moved) all = false;
  }
  TC_RETURN_IF_ERROR(target.SyncParents(below));
  return all.load();
}

// Steps 3c and 3d, after 3b. What was not there to be moved is looked for once
// more where it should be by now.
Status Replay(const Directory& staging, const Directory& gone,
              const Directory& target, const Journal& journal, bool own) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> removed,
                      TakeAwayAll(gone, target, journal, own));
  TC_ASSIGN_OR_RETURN(const bool all, MoveAll(staging, target, journal));
  // Both ends of the renames, before the journal that could repeat them goes.
  TC_RETURN_IF_ERROR(target.SyncParents(removed));
  TC_RETURN_IF_ERROR(target.Sync());
  TC_RETURN_IF_ERROR(gone.Sync());
  TC_RETURN_IF_ERROR(staging.Sync());
  return all ? Status() : Prove(staging, target, journal, own);
}

// Whether `staging` is what is committed at the place, with its journal.
Result<bool> StillStands(const Directory& place, const Directory& staging) {
  TC_ASSIGN_OR_RETURN(const auto named,
                      place.StatEntry(std::string(kCommittedName)));
  TC_ASSIGN_OR_RETURN(const FileInfo held, staging.Stat());
  if (!named || !named->SameFile(held)) return false;
  TC_ASSIGN_OR_RETURN(const auto journal,
                      staging.StatEntry(std::string(kJournalName)));
  return journal.has_value();
}

// Frees the name of a directory whose journal is gone. What a network file
// system keeps for who has it open stays, under another name.
Status FreeName(const Directory& place) {
  const std::string name(kCommittedName);
  Status freed;
  for (int i = 0; i < kTries; ++i) {
    const Result<Directory> shell = place.OpenDirectory(name);
    // A file or a link of that name is nobody's, and goes with a sweep.
    const int missing = shell.status().sys_errno();
    if (missing == ENOENT || missing == ENOTDIR) return {};
    TC_RETURN_IF_ERROR(shell.status());
    TC_ASSIGN_OR_RETURN(const auto journal,
                        shell->StatEntry(std::string(kJournalName)));
    if (journal) return {};  // another save has committed
    (void)EmptyDirectory(*shell, {});
    // It goes only when it is empty: not that of another one.
    freed = place.RemoveDirectory(name, /*missing_ok=*/true);
    const int error = freed.sys_errno();
    if (error != ENOTEMPTY && error != EBUSY) return freed;
  }
  const std::string aside = DeadName(NewId());
  TC_RETURN_IF_ERROR(place.Rename(name, place, aside));
  const Result<Directory> moved = place.OpenDirectory(aside);
  if (!moved.ok()) return {};
  const auto journal = moved->StatEntry(std::string(kJournalName));
  if (journal.ok() && !*journal) return {};
  return place.Rename(aside, place, name);  // it was that of another one
}

// Step 4. Ok where others have done it.
Status Retire(const Directory& place, const Directory& staging,
              const Directory& gone) {
  const std::string name(kJournalName);
  Status retired = staging.Rename(name, gone, name);
  if (retired.sys_errno() == ENOSPC || retired.sys_errno() == EDQUOT) {
    retired = staging.Unlink(name, /*missing_ok=*/true);
  }
  const int error = retired.sys_errno();
  if (error != ENOENT && error != ESTALE) {
    TC_RETURN_IF_ERROR(std::move(retired));
    TC_RETURN_IF_ERROR(staging.Sync());
  }
  TC_RETURN_IF_ERROR(FreeName(place));
  return place.Sync();
}

// Made anew where a crash has kept its removal and not that of the journal.
Result<Directory> OpenGone(const Directory& staging, const Journal& journal) {
  const std::string name = GoneName(journal);
  Result<Directory> gone = staging.OpenDirectory(name);
  if (gone.status().sys_errno() != ENOENT) return gone;
  const Status made = staging.MakeDirectory(name);
  if (!made.ok() && made.sys_errno() != EEXIST) return made;
  return staging.OpenDirectory(name);
}

// Step 1, but for the syncs of what is not this save's own.
Status Draft(const Directory& staging, const Journal& journal) {
  if (!journal.IsRemoval()) {
    TC_RETURN_IF_ERROR(staging.WriteFile(NextManifest(journal),
                                         EncodeManifest(journal.manifest)));
  }
  TC_RETURN_IF_ERROR(staging.MakeDirectory(GoneName(journal)));
  TC_RETURN_IF_ERROR(
      staging.WriteFile(std::string(kJournalName), EncodeJournal(journal)));
  return staging.Sync();
}

}  // namespace

Status WriteJournal(const Directory& place, const Directory& staging,
                    const Directory& target, const Journal& journal,
                    const std::function<Status()>& check) {
  Status drafted = Draft(staging, journal);
  if (PlacePatience::Changed(drafted)) return Superseded(place);
  TC_RETURN_IF_ERROR(std::move(drafted));
  TC_RETURN_IF_ERROR(place.Sync());
  TC_RETURN_IF_ERROR(target.Sync());
  TC_RETURN_IF_ERROR(check());
  Status renamed;
  for (int i = 0; i < kTries; ++i) {
    renamed = place.Rename(journal.manifest.save_id, place,
                           std::string(kCommittedName));
    const int error = renamed.sys_errno();
    if (error != ENOTEMPTY && error != EEXIST) break;
    // An empty shell, or what others have put into one meanwhile.
    TC_RETURN_IF_ERROR(FreeName(place));
  }
  if (!renamed.ok()) {
    const int error = renamed.sys_errno();
    // A network file system may have lost only its answer.
    TC_ASSIGN_OR_RETURN(const bool ours, StillStands(place, staging));
    if (ours) {
      renamed = Status();
    } else if (error == ENOENT) {
      return Superseded(place);
    } else if (error == ENOTEMPTY || error == EEXIST || error == ENOTDIR) {
      return Conflict("another save has committed into it just now")
          .WithFile(target.path());
    }
  }
  TC_RETURN_IF_ERROR(std::move(renamed));
  return place.Sync();  // the commit point
}

Status CarryOut(const Directory& place, const Directory& staging,
                const Directory& target, const Journal& journal) {
  // What an error means once the journal does not stand any more: others have
  // carried it out, and gone on.
  const auto explain = [&](const Status& why) -> Status {
    const Result<bool> stands = StillStands(place, staging);
    if (!stands.ok() || *stands) return why;
    return Conflict("another save has replaced it meanwhile (" +
                    why.ToString() + ")")
        .WithFile(target.path());
  };
  const Result<Directory> gone = staging.OpenDirectory(GoneName(journal));
  if (!gone.ok()) return explain(gone.status());
  const Status proved = Prove(staging, target, journal, /*own=*/true);
  if (!proved.ok()) {
    Status status = explain(proved);
    if (!IsBroken(status)) return status;
    TC_RETURN_IF_ERROR(Retire(place, staging, *gone));
    return Conflict("its files were changed while it was committed (" +
                    proved.ToString() + ")")
        .WithFile(target.path());
  }
  const Status replayed = Replay(staging, *gone, target, journal, /*own=*/true);
  if (!replayed.ok()) return explain(replayed);
  (void)Retire(place, staging, *gone);
  return {};
}

Result<bool> CarryOutFound(const Directory& place, const Directory& target,
                           Status* given_up) {
  TC_ASSIGN_OR_RETURN(const auto found, FindJournal(place));
  if (!found) {
    TC_RETURN_IF_ERROR(FreeName(place));
    return false;
  }
  const Directory& staging = found->staging;
  const std::string name(kJournalName);
  // After an error: true where the journal does not stand any more, since
  // another one has carried it out.
  const auto explain = [&](const Status& why) -> Result<bool> {
    TC_ASSIGN_OR_RETURN(const bool stands, StillStands(place, staging));
    if (stands) return why;
    return true;
  };
  TC_RETURN_IF_ERROR(place.Sync());
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(target.Sync());
  const Result<Journal> journal = ParseJournal(AsBytes(found->text));
  Status broken = journal.status();
  if (!broken.ok()) broken = std::move(broken).WithFile(staging.Join(name));
  if (journal.ok()) {
    const Status proved = Prove(staging, target, *journal, /*own=*/false);
    if (!proved.ok()) {
      Result<bool> explained = explain(proved);
      if (explained.ok() || !IsBroken(proved)) return explained;
      broken = proved;
    }
  }
  if (!broken.ok()) {
    broken = Status(broken.kind(),
                    "holds a commit that was interrupted and cannot be carried "
                    "out (" +
                        broken.ToString() +
                        "): save into it anew, or remove this directory, which "
                        "leaves what stood there before")
                 .WithFile(staging.path());
    if (!given_up || !IsBroken(broken)) return broken;
    *given_up = std::move(broken);
    TC_RETURN_IF_ERROR(staging.Unlink(name, /*missing_ok=*/true));
    TC_RETURN_IF_ERROR(staging.Sync());
    TC_RETURN_IF_ERROR(FreeName(place));
    TC_RETURN_IF_ERROR(place.Sync());
    return true;
  }
  const Result<Directory> gone = OpenGone(staging, *journal);
  if (!gone.ok()) return explain(gone.status());
  const Status replayed =
      Replay(staging, *gone, target, *journal, /*own=*/false);
  if (!replayed.ok()) return explain(replayed);
  TC_RETURN_IF_ERROR(Retire(place, staging, *gone));
  return true;
}

}  // namespace torch_ckpt
