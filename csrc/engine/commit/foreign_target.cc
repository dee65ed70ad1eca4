#include "engine/commit/foreign_target.h"

#include <string>
#include <vector>

#include "engine/open/archives.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

// Whether it is a regular file that begins as torch.save has them since 1.6, or
// a directory without anything in it.
Result<bool> IsAlike(const ForeignTarget& target, const FileInfo& info) {
  constexpr uint64_t kFirstBytes = 4;
  if (!target.is_file) {
    if (!info.is_directory) return false;
    TC_ASSIGN_OR_RETURN(const Directory there, Directory::Open(target.path));
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, there.List());
    return names.empty();
  }
  if (!info.is_regular || info.bytes < kFirstBytes) return false;
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(target.path)));
  TC_ASSIGN_OR_RETURN(const File file, parent.OpenFile(BaseName(target.path),
                                                       {.no_follow = true}));
  return IsTorchArchive(file, 0);
}

// kConflict for what stands at T and is not to be replaced.
Status CheckMayReplace(const ForeignTarget& target) {
  TC_ASSIGN_OR_RETURN(const auto info, StatPathEntry(target.path));
  if (!info) return {};
  TC_ASSIGN_OR_RETURN(const bool alike, IsAlike(target, *info));
  if (alike && (target.overwrite || !target.is_file)) return {};
  const char* why = !target.is_file ? "; give another directory"
                    : alike ? "; overwrite=True (--overwrite) replaces it"
                            : ", and no file of torch.save";
  return Conflict(std::string("is there already") + why).WithFile(target.path);
}

// Renames what is staged to T. Where that fails because of what has come to
// stand there, it says so.
Status Rename(const Directory& from, const std::string& staged,
              const Directory& parent, const ForeignTarget& target) {
  const std::string name = BaseName(target.path);
  TC_ASSIGN_OR_RETURN(const auto held, from.StatEntry(staged));
  Status renamed = target.is_file && !target.overwrite
                       ? from.RenameNoReplace(staged, parent, name)
                       : from.Rename(staged, parent, name);
  if (renamed.ok()) return renamed;
  // A network file system may have lost only its answer.
  TC_ASSIGN_OR_RETURN(const auto there, parent.StatEntry(name));
  if (held && there && there->SameFile(*held)) return {};
  TC_RETURN_IF_ERROR(CheckMayReplace(target));
  return renamed;
}

Status PutIntoPlace(const SaveSession& session, const ForeignTarget& target,
                    const std::string& staged) {
  const Directory& staging = session.directory();
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(target.path)));
  TC_RETURN_IF_ERROR(staging.RemoveTree(std::string(kLayoutName)));
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(CheckMayReplace(target));
  TC_RETURN_IF_ERROR(session.CheckStillOurs());
  const Directory& from = target.is_file ? staging : session.root();
  TC_RETURN_IF_ERROR(Rename(from, staged, parent, target));
  TC_RETURN_IF_ERROR(from.Sync());
  return parent.Sync();  // the commit point
}

}  // namespace

Result<SaveSession> BeginForeign(const ForeignTarget& target) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target.path));
  TC_RETURN_IF_ERROR(
      CheckMayReplace({absolute, target.is_file, target.overwrite}));
  TC_ASSIGN_OR_RETURN(SaveSession session,
                      BeginSave(absolute, target.overwrite, /*others=*/false,
                                /*beside=*/true));
  TC_RETURN_IF_ERROR(
      session.directory().MakeDirectory(std::string(kLayoutName)));
  return session;
}

Status CommitForeign(SaveSession* session, const ForeignTarget& target,
                     const std::string& staged) {
  const StagingPlace& place = session->place();
  TC_RETURN_IF_ERROR(ExplainGone(
      PutIntoPlace(*session, {place.target, target.is_file, target.overwrite},
                   target.is_file ? staged : BaseName(place.path)),
      place.path));
  session->End();
  return {};
}

}  // namespace torch_ckpt
