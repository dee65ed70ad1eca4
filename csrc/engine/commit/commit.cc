#include "engine/commit/commit.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>

#include "engine/commit/each_file.h"
#include "engine/commit/journal.h"
#include "engine/commit/previous.h"
#include "engine/commit/rank_parts.h"
#include "engine/commit/staged_files.h"
#include "engine/write/output_files.h"
#include "format/names.h"
#include "format/safetensors/hf_index.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

// Of the tensors in the directory that the index `name` is to stand in.
Result<std::string> IndexText(std::string_view name,
                              const CatalogBuilder& catalog,
                              const std::vector<StagedFile>& files) {
  HfIndex index;
  for (uint32_t e = 0; e < catalog.size(); ++e) {
    const CatalogBuilder::Entry& entry = catalog.entry(e);
    if (entry.kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog.Placements(e));
    const std::string& path = files[placements[0].file].name;
    if (SubdirectoryOf(path) != SubdirectoryOf(name)) continue;
    const std::string_view file = FileNameOf(path);
    TC_RETURN_IF_ERROR(CheckFileName(file));  // as readers of the index do
    index.weight_map.emplace_back(entry.name, file);
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        ByteSize(entry.dtype, entry.shape));
    index.total_size += bytes;
  }
  std::sort(index.weight_map.begin(), index.weight_map.end());
  return BuildHfIndex(index);
}

// Whether readers will take what is about to be committed: afterwards it would
// be too late.
Status CheckEncoding(const Journal& journal) {
  const Status status = ParseJournal(AsBytes(EncodeJournal(journal))).status();
  if (status.ok()) return {};
  return InvalidArgument("the files to commit make no valid manifest: " +
                         status.ToString());
}

std::vector<std::string> DataAndIndexNames(
    const std::vector<StagedFile>& files) {
  std::vector<std::string> names;
  for (const StagedFile& file : files) {
    if (file.role == FileRole::kData || file.role == FileRole::kIndex) {
      names.push_back(file.name);
    }
  }
  return names;
}

// After the commit point it is too late to find that a step cannot be done.
Status CheckReplay(const Directory& staging, const Directory& target,
                   const Journal& journal) {
  TC_RETURN_IF_ERROR(ForEachFile(journal.removes.size(), [&](size_t i) {
    return target.CheckReplaceable(journal.removes[i]);
  }));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> staged, staging.List());
  TC_RETURN_IF_ERROR(
      ForEachFile(journal.renames.size(), [&](size_t i) -> Status {
        const JournalRename& rename = journal.renames[i];
        TC_RETURN_IF_ERROR(target.CheckReplaceable(rename.to));
        if (std::binary_search(staged.begin(), staged.end(), rename.from)) {
          return {};
        }
        return Incomplete("has gone from staging since it was written")
            .WithFile(staging.Join(rename.from));
      }));
  return target.CheckReplaceable(std::string(kManifestName));
}

// T may have been made just before the save, by whoever wanted it. A parent
// that we may not read was not made by us, nor is it ours to sync.
Status SyncNameOf(const Directory& target) {
  const Result<Directory> parent = Directory::Open(ParentPath(target.path()));
  if (parent.status().sys_errno() == EACCES) return {};
  if (!parent.ok()) return parent.status();
  TC_ASSIGN_OR_RETURN(const FileInfo of_parent, parent->Stat());
  TC_ASSIGN_OR_RETURN(const FileInfo of_target, target.Stat());
  return of_parent.device == of_target.device ? parent->Sync() : Status();
}

Status CommitExisting(SaveSession* session, const CommitRequest& request,
                      const std::vector<StagedFile>& files,
                      Manifest* manifest) {
  const Directory& staging = session->directory();
  TC_ASSIGN_OR_RETURN(const Directory target,
                      Directory::Open(session->place().target));
  TC_ASSIGN_OR_RETURN(Previous previous, ReadPrevious(target));
  NewFiles new_files;
  new_files.names = DataAndIndexNames(files);
  new_files.keep = request.keep;
  TC_RETURN_IF_ERROR(CheckNotHidden(target, previous, new_files));
  const std::set<std::string> keep(request.keep.begin(), request.keep.end());
  Journal journal;
  journal.removes = std::move(previous.part_manifests);
  TC_ASSIGN_OR_RETURN(std::vector<std::string> of_others,
                      session->ReplacedOfOthers(target));
  std::move(of_others.begin(), of_others.end(),
            std::back_inserter(journal.removes));
  std::vector<ManifestFile> kept;
  const FilesByName named(manifest->files);
  for (ManifestFile& old : previous.files) {
    if (named.Find(old.name) >= 0) continue;
    if (keep.contains(old.name)) {
      kept.push_back(std::move(old));
    } else {
      journal.removes.push_back(std::move(old.name));
    }
  }
  // Behind the others: the catalog knows files by their place.
  std::move(kept.begin(), kept.end(), std::back_inserter(manifest->files));
  for (const StagedFile& file : files) {
    journal.renames.push_back({file.staged, file.name});
  }
  journal.manifest = *manifest;
  TC_RETURN_IF_ERROR(CheckEncoding(journal));
  TC_RETURN_IF_ERROR(SyncNameOf(target));
  TC_RETURN_IF_ERROR(
      WriteJournal(session->root(), staging, target, journal, [&]() -> Status {
        TC_RETURN_IF_ERROR(CheckReplay(staging, target, journal));
        TC_RETURN_IF_ERROR(session->CheckTarget(target));
        return session->CheckStillOurs();
      }));
  return CarryOut(session->root(), staging, target, journal);
}

// Ok(true) when committed, Ok(false) when T has come to be meanwhile.
Result<bool> CommitFresh(SaveSession* session,
                         const std::vector<StagedFile>& files,
                         const Manifest& manifest) {
  const Directory& staging = session->directory();
  const StagingPlace& place = session->place();
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(place.target)));
  const std::string name = BaseName(place.target);
  TC_ASSIGN_OR_RETURN(const auto existing, parent.StatEntry(name));
  if (existing) return false;
  std::vector<std::string> paths;
  for (const StagedFile& file : files) paths.push_back(file.name);
  TC_RETURN_IF_ERROR(staging.MakeParents(paths));
  TC_RETURN_IF_ERROR(ForEachFile(files.size(), [&](size_t i) {
    return staging.Rename(files[i].staged, staging, files[i].name);
  }));
  TC_RETURN_IF_ERROR(
      staging.WriteFile(std::string(kManifestName), EncodeManifest(manifest)));
  TC_ASSIGN_OR_RETURN(const auto entries, staging.List());
  std::set<std::string, std::less<>> final_names = {std::string(kManifestName)};
  for (const ManifestFile& file : manifest.files) {
    final_names.insert(file.name.substr(0, file.name.find('/')));
  }
  TC_RETURN_IF_ERROR(staging.SyncParents(paths));
  TC_RETURN_IF_ERROR(ForEachFile(entries.size(), [&](size_t i) {
    return final_names.contains(entries[i])
               ? Status()
               : staging.Unlink(entries[i], /*missing_ok=*/true);
  }));
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_RETURN_IF_ERROR(session->CheckStillOurs());
  TC_ASSIGN_OR_RETURN(const FileInfo held, staging.Stat());
  Status renamed =
      session->root().RenameNoReplace(BaseName(place.path), parent, name);
  if (!renamed.ok()) {
    // A network file system may have lost only its answer.
    TC_ASSIGN_OR_RETURN(const auto there, parent.StatEntry(name));
    if (there && there->SameFile(held)) renamed = {};
  }
  if (renamed.ok()) {
    TC_RETURN_IF_ERROR(session->root().Sync());
    TC_RETURN_IF_ERROR(parent.Sync());  // the commit point
    return true;
  }
  if (renamed.sys_errno() == ENOENT) {
    return Conflict(
               "another save into this directory has begun since, and this "
               "one can no longer be committed")
        .WithFile(place.target);
  }
  if (renamed.kind() != ErrorKind::kConflict) return renamed;
  // Back to staged names, for the journal.
  TC_RETURN_IF_ERROR(ForEachFile(files.size(), [&](size_t i) {
    return staging.Rename(files[i].name, staging, files[i].staged);
  }));
  TC_RETURN_IF_ERROR(staging.Unlink(std::string(kManifestName), true));
  return false;
}

Result<Manifest> Commit(SaveSession* session, const CommitRequest& request) {
  const Directory& staging = session->directory();
  TC_ASSIGN_OR_RETURN(const CatalogBuilder catalog,
                      CatalogOfStaged(staging, request, BoxProof::kTiling));
  std::vector<StagedFile> files = request.files;
  TC_ASSIGN_OR_RETURN(StagedFile catalog_file,
                      AddStagedCatalog(staging, kCatalogName, catalog, files));
  files.push_back(std::move(catalog_file));
  if (!request.index_name.empty()) {
    TC_ASSIGN_OR_RETURN(const std::string text,
                        IndexText(request.index_name, catalog, request.files));
    TC_ASSIGN_OR_RETURN(
        StagedFile index,
        AddStagedFile(staging, request.index_name, FileRole::kIndex, text));
    files.push_back(std::move(index));
  }
  Manifest manifest;
  manifest.save_id = session->save_id();
  manifest.world_size = request.world_size;
  manifest.metadata = request.metadata;
  for (const StagedFile& file : files) manifest.files.push_back(file);
  TC_RETURN_IF_ERROR(CheckEncoding({manifest, {}, {}}));
  // As at the begin, when an old view was looked at again.
  Status part = RefusePart(session->place().target);
  if (!PlacePatience::Changed(part)) TC_RETURN_IF_ERROR(std::move(part));
  bool committed = false;
  if (session->place().fresh) {
    TC_ASSIGN_OR_RETURN(committed, CommitFresh(session, files, manifest));
    if (!committed) {
      // T has come to be meanwhile: go on inside it.
      TC_RETURN_IF_ERROR(session->MoveInside());
    }
  }
  if (!committed) {
    TC_RETURN_IF_ERROR(CommitExisting(session, request, files, &manifest));
  }
  return manifest;
}

// ENOTDIR: what is a file has no place in it.
bool IsMissing(const Status& status) {
  return status.sys_errno() == ENOENT || status.sys_errno() == ENOTDIR;
}

Result<std::optional<FileInfo>> StatPlace(const std::string& path) {
  auto info = StatPathEntry(path);
  if (IsMissing(info.status())) return std::optional<FileInfo>();
  return info;
}

}  // namespace

Result<Manifest> CommitSave(SaveSession* session,
                            const CommitRequest& request) {
  Result<Manifest> manifest = Commit(session, request);
  if (manifest.ok()) {
    session->End();
    return manifest;
  }
  // Files that have gone are best explained by who has removed them.
  const Status& status = manifest.status();
  if (status.sys_errno() == ENOENT || status.sys_errno() == ESTALE ||
      status.kind() == ErrorKind::kIncomplete) {
    const Status ours = session->CheckStillOurs();
    if (ours.kind() == ErrorKind::kConflict) {
      return Conflict(ours.message() + ": " + status.ToString())
          .WithFile(ours.file());
    }
  }
  return manifest;
}

Result<std::vector<StagedPlace>> StagedPlaces(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  std::vector<std::string> paths = {PlaceInside(absolute),
                                    PlaceBeside(absolute)};
  const Result<Directory> directory = Directory::Open(absolute);
  if (directory.ok()) {
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        directory->List());
    for (const std::string& name : names) {
      if (RankOfPartStage(name)) paths.push_back(directory->Join(name));
    }
  } else if (!IsMissing(directory.status())) {
    return directory.status();
  }
  std::vector<StagedPlace> found;
  for (std::string& path : paths) {
    TC_ASSIGN_OR_RETURN(const auto info, StatPlace(path));
    if (!info || !info->is_directory) continue;
    const Result<bool> held = DirectoryLock::IsHeld(path);
    if (held.status().sys_errno() == ENOENT) continue;  // it went with its save
    TC_RETURN_IF_ERROR(held.status());
    TC_ASSIGN_OR_RETURN(const auto journal,
                        StatPathEntry(path + "/" + std::string(kCommittedName) +
                                      "/" + std::string(kJournalName)));
    found.push_back({std::move(path), *held, journal.has_value()});
  }
  return found;
}

Result<bool> RecoverDirectory(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  bool acted = false;
  const std::string inner = PlaceInside(absolute);
  for (const std::string& place : {inner, PlaceBeside(absolute)}) {
    TC_ASSIGN_OR_RETURN(const auto info, StatPlace(place));
    if (!info) continue;
    TC_RETURN_IF_ERROR(RefuseLink(place));
    Result<DirectoryLock> acquired = DirectoryLock::Acquire(place);
    const int error = acquired.status().sys_errno();
    if (error == ENOENT || error == ESTALE) continue;  // it went with its save
    TC_ASSIGN_OR_RETURN(DirectoryLock lock, std::move(acquired));
    TC_ASSIGN_OR_RETURN(const Directory parent,
                        Directory::Open(ParentPath(place)));
    if (place == inner) {
      TC_RETURN_IF_ERROR(CarryOutAndSweep(lock.directory(), parent));
    } else {
      TC_RETURN_IF_ERROR(SweepPlace(lock.directory()).status());
    }
    TC_RETURN_IF_ERROR(lock.Remove());
    TC_RETURN_IF_ERROR(parent.Sync());
    acted = true;
  }
  Result<Directory> directory = Directory::Open(absolute);
  if (!directory.ok()) {
    if (IsMissing(directory.status())) return acted;
    return directory.status();
  }
  TC_ASSIGN_OR_RETURN(const bool parts, RemoveDeadParts(*directory));
  return acted || parts;
}

}  // namespace torch_ckpt
