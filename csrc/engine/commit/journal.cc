#include "engine/commit/journal.h"

#include <cerrno>
#include <optional>

#include "engine/open/checkpoint.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

Status Superseded(const Directory& root) {
  return Conflict(
             "another save into this directory has begun since, and this one "
             "can no longer be committed")
      .WithFile(root.path());
}

}  // namespace

std::string JournalDraftName(const std::string& save_id) {
  return save_id + ".new";
}

Status WriteJournal(const Directory& root, const Directory& staging,
                    const Directory& target, const Journal& journal,
                    const std::function<Status()>& check) {
  const std::string name(kJournalName);
  const std::string draft = JournalDraftName(journal.manifest.save_id);
  Status written = root.WriteFile(draft, EncodeJournal(journal));
  if (written.sys_errno() == EEXIST) return Superseded(root);
  TC_RETURN_IF_ERROR(std::move(written));
  TC_ASSIGN_OR_RETURN(const auto own, root.StatEntry(draft));
  if (!own) return Superseded(root);
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(root.Sync());
  TC_RETURN_IF_ERROR(target.Sync());
  TC_RETURN_IF_ERROR(check());
  Status renamed = root.RenameNoReplace(draft, root, name);
  if (!renamed.ok()) {
    // A network file system may have lost only its answer.
    TC_ASSIGN_OR_RETURN(const auto there, root.StatEntry(name));
    if (there && there->SameFile(*own)) {
      renamed = Status();
    } else if (renamed.sys_errno() == ENOENT) {
      return Superseded(root);
    }
  }
  TC_RETURN_IF_ERROR(std::move(renamed));
  return root.Sync();  // the commit point
}

Status ReplayJournal(const Directory& root, const Directory& target) {
  const std::string name(kJournalName);
  Result<std::string> text = root.ReadFile(name, kMaxManifestBytes);
  if (!text.ok()) {
    return text.status().sys_errno() == ENOENT ? Status() : text.status();
  }
  Result<Journal> journal = ParseJournal(AsBytes(*text));
  if (!journal.ok()) return journal.status().WithFile(root.Join(name));
  const Manifest& manifest = journal->manifest;
  TC_ASSIGN_OR_RETURN(const Directory staging, JournalStaging(root, manifest));
  TC_RETURN_IF_ERROR(root.Sync());
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(target.Sync());
  for (const std::string& old : journal->removes) {
    TC_RETURN_IF_ERROR(target.Unlink(old, /*missing_ok=*/true));
    TC_RETURN_IF_ERROR(target.RemoveEmptyParents(old));
  }
  std::vector<std::string> below;  // subdirectories of the target
  for (const JournalRename& rename : journal->renames) {
    if (rename.to.find('/') == rename.to.npos) continue;
    TC_RETURN_IF_ERROR(target.MakeParents(rename.to));
    below.push_back(rename.to);
  }
  if (!below.empty()) {
    // Durable before staging gives up a file that goes there.
    TC_RETURN_IF_ERROR(target.SyncParents(below));
    TC_RETURN_IF_ERROR(target.Sync());
  }
  for (const JournalRename& rename : journal->renames) {
    Status status = staging.Rename(rename.from, target, rename.to);
    // Renamed by an earlier replay.
    if (!status.ok() && status.sys_errno() != ENOENT) return status;
    if (!status.ok()) {
      TC_ASSIGN_OR_RETURN(const auto there, target.StatName(rename.to));
      if (!there) {
        return Incomplete(
                   "the commit names it, but it is neither in staging "
                   "nor in its place")
            .WithFile(target.Join(rename.to));
      }
    }
  }
  // Under a name that no other replay uses.
  const std::string fresh = StagedName(kManifestName, NewId());
  TC_RETURN_IF_ERROR(staging.WriteFile(fresh, EncodeManifest(manifest)));
  TC_RETURN_IF_ERROR(staging.Rename(fresh, target, std::string(kManifestName)));
  // Both ends of the renames, before the journal that could repeat them goes.
  std::vector<std::string> changed = journal->removes;
  changed.insert(changed.end(), below.begin(), below.end());
  TC_RETURN_IF_ERROR(target.SyncParents(changed));
  TC_RETURN_IF_ERROR(target.Sync());
  return staging.Sync();
}

Status RemoveJournal(const Directory& root) {
  TC_RETURN_IF_ERROR(
      root.Unlink(std::string(kJournalName), /*missing_ok=*/true));
  return root.Sync();
}

}  // namespace torch_ckpt
