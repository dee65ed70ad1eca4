#include "engine/journal.h"

#include <cerrno>

#include "format/names.h"

namespace torch_ckpt {
namespace {

constexpr const char* kNewManifest = ".torch_ckpt.json.new";

}  // namespace

Status WriteJournal(const Directory& staging, const Directory& target,
                    const Journal& journal, bool* reached) {
  *reached = false;
  const std::string name(kJournalName);
  const std::string temporary = name + ".new";
  TC_RETURN_IF_ERROR(staging.Unlink(temporary, /*missing_ok=*/true));
  TC_RETURN_IF_ERROR(staging.WriteFile(temporary, EncodeJournal(journal)));
  // The files and T's entry for staging must be durable before the journal is.
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(target.Sync());
  *reached = true;
  TC_RETURN_IF_ERROR(staging.Rename(temporary, staging, name));
  return staging.Sync();  // the commit point
}

Status ReplayJournal(const Directory& staging, const Directory& target) {
  const std::string name(kJournalName);
  Result<std::string> text = staging.ReadFile(name, kMaxManifestBytes);
  if (!text.ok()) {
    return text.status().sys_errno() == ENOENT ? Status() : text.status();
  }
  Result<Journal> journal = ParseJournal(AsBytes(*text));
  if (!journal.ok()) return journal.status().WithFile(staging.Join(name));
  for (const std::string& old : journal->removes) {
    TC_RETURN_IF_ERROR(target.Unlink(old, /*missing_ok=*/true));
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
  TC_RETURN_IF_ERROR(target.Unlink(kNewManifest, true));
  TC_RETURN_IF_ERROR(
      target.WriteFile(kNewManifest, EncodeManifest(journal->manifest)));
  TC_RETURN_IF_ERROR(
      target.Rename(kNewManifest, target, std::string(kManifestName)));
  // Both ends of the renames, before the journal that could repeat them goes.
  TC_RETURN_IF_ERROR(target.Sync());
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(staging.Unlink(name, true));
  return staging.Sync();
}

}  // namespace torch_ckpt
