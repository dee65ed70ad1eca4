#include "engine/commit.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>

#include "engine/journal.h"
#include "engine/output_files.h"
#include "engine/parts.h"
#include "engine/previous.h"
#include "engine/staged_files.h"
#include "format/hf_index.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

Result<std::string> IndexText(const CatalogBuilder& catalog,
                              const std::vector<CommitFile>& files) {
  HfIndex index;
  for (uint32_t e = 0; e < catalog.size(); ++e) {
    const CatalogBuilder::Entry& entry = catalog.entry(e);
    if (entry.kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog.Placements(e));
    index.weight_map.emplace_back(entry.name,
                                  files[placements[0].file].file.name);
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
    const std::vector<CommitFile>& files) {
  std::vector<std::string> names;
  for (const CommitFile& file : files) {
    if (file.file.role == FileRole::kData ||
        file.file.role == FileRole::kIndex) {
      names.push_back(file.file.name);
    }
  }
  return names;
}

Status CommitExisting(SaveSession* session, const CommitRequest& request,
                      const std::vector<CommitFile>& files,
                      Manifest* manifest) {
  const Directory& staging = session->directory();
  TC_ASSIGN_OR_RETURN(const Directory target,
                      Directory::Open(session->place().target));
  TC_ASSIGN_OR_RETURN(Previous previous, ReadPrevious(target));
  const NewFiles new_files{DataAndIndexNames(files), 0, request.keep};
  TC_RETURN_IF_ERROR(CheckNotHidden(target, previous, new_files));
  const std::set<std::string> keep(request.keep.begin(), request.keep.end());
  Journal journal;
  journal.removes = std::move(previous.part_manifests);
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
  for (const CommitFile& file : files) {
    journal.renames.push_back({file.staged, file.file.name});
  }
  journal.manifest = *manifest;
  TC_RETURN_IF_ERROR(CheckEncoding(journal));
  // T may have been made just before the save, by whoever wanted it.
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(session->place().target)));
  TC_ASSIGN_OR_RETURN(const FileInfo of_parent, parent.Stat());
  TC_ASSIGN_OR_RETURN(const FileInfo of_target, target.Stat());
  if (of_parent.device == of_target.device) {
    TC_RETURN_IF_ERROR(parent.Sync());
  }
  bool reached = false;
  TC_RETURN_IF_ERROR(WriteJournal(staging, target, journal, &reached));
  TC_RETURN_IF_ERROR(ReplayJournal(staging, target));
  TC_RETURN_IF_ERROR(session->RemoveStaging());
  return target.Sync();
}

// Ok(true) when committed, Ok(false) when T has come to be meanwhile.
Result<bool> CommitFresh(SaveSession* session,
                         const std::vector<CommitFile>& files,
                         const Manifest& manifest) {
  const Directory& staging = session->directory();
  const StagingPlace& place = session->place();
  TC_ASSIGN_OR_RETURN(const Directory parent,
                      Directory::Open(ParentPath(place.target)));
  const std::string name = BaseName(place.target);
  TC_ASSIGN_OR_RETURN(const StagingPlace now, LocateStaging(place.target));
  if (!now.fresh) return false;
  for (const CommitFile& file : files) {
    TC_RETURN_IF_ERROR(staging.Rename(file.staged, staging, file.file.name));
  }
  TC_RETURN_IF_ERROR(
      staging.WriteFile(std::string(kManifestName), EncodeManifest(manifest)));
  TC_ASSIGN_OR_RETURN(const auto entries, staging.List());
  const FilesByName final_names(manifest.files);
  for (const std::string& entry : entries) {
    // The lock is held until the rename is through.
    if (entry == kManifestName || entry == kLockFileName) continue;
    if (final_names.Find(entry) < 0) {
      TC_RETURN_IF_ERROR(staging.Unlink(entry, true));
    }
  }
  TC_RETURN_IF_ERROR(staging.Sync());
  TC_ASSIGN_OR_RETURN(const auto named, parent.StatName(BaseName(place.path)));
  TC_ASSIGN_OR_RETURN(const FileInfo held, staging.Stat());
  if (!named || !named->SameFile(held)) {
    return Conflict("the staging directory was moved or replaced")
        .WithFile(place.path);
  }
  Status renamed = parent.RenameNoReplace(BaseName(place.path), parent, name);
  if (renamed.kind() == ErrorKind::kUnsupported) {
    renamed = parent.Rename(BaseName(place.path), parent, name);
  }
  if (!renamed.ok()) {
    // A network file system may have lost only its answer.
    TC_ASSIGN_OR_RETURN(const auto there, parent.StatName(name));
    if (there && there->SameFile(held)) renamed = {};
  }
  if (renamed.ok()) {
    // From here on ending the session must not clean: staging is T now.
    session->Finish();
    TC_RETURN_IF_ERROR(parent.Sync());  // the commit point
    return true;
  }
  if (renamed.kind() != ErrorKind::kConflict &&
      renamed.sys_errno() != ENOTEMPTY && renamed.sys_errno() != EEXIST) {
    return renamed;
  }
  // Back to staged names, for the journal.
  for (const CommitFile& file : files) {
    TC_RETURN_IF_ERROR(staging.Rename(file.file.name, staging, file.staged));
  }
  TC_RETURN_IF_ERROR(staging.Unlink(std::string(kManifestName), true));
  return false;
}

}  // namespace

Result<Manifest> CommitSave(SaveSession* session,
                            const CommitRequest& request) {
  const Directory& staging = session->directory();
  TC_ASSIGN_OR_RETURN(const CatalogBuilder catalog,
                      CatalogOfStaged(staging, request, BoxProof::kTiling));
  std::vector<CommitFile> files = request.files;
  TC_ASSIGN_OR_RETURN(CommitFile catalog_file,
                      AddStagedCatalog(staging, kCatalogName, catalog, files));
  files.push_back(std::move(catalog_file));
  if (!request.index_name.empty()) {
    TC_ASSIGN_OR_RETURN(const std::string text,
                        IndexText(catalog, request.files));
    TC_ASSIGN_OR_RETURN(
        CommitFile index,
        AddStagedFile(staging, request.index_name, FileRole::kIndex, text));
    files.push_back(std::move(index));
  }
  Manifest manifest;
  manifest.save_id = session->save_id();
  manifest.world_size = request.world_size;
  for (const CommitFile& file : files) manifest.files.push_back(file.file);
  TC_RETURN_IF_ERROR(CheckEncoding({manifest, {}, {}}));
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
  session->Finish();
  return manifest;
}

Result<bool> RecoverDirectory(const std::string& target) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(target));
  bool acted = false;
  const std::string parent_path = ParentPath(absolute);
  const std::string sibling = SiblingStageName(absolute);
  struct Place {
    std::string parent, name;
    bool journal;
  };
  for (const Place& place : {Place{absolute, std::string(kStageSuffix), true},
                             Place{parent_path, sibling, false}}) {
    Result<Directory> parent = Directory::Open(place.parent);
    if (!parent.ok()) {
      if (parent.status().sys_errno() == ENOENT) continue;
      return parent.status();
    }
    TC_ASSIGN_OR_RETURN(const auto info, parent->StatName(place.name));
    if (!info) continue;
    TC_RETURN_IF_ERROR(RefuseLink(parent->Join(place.name)));
    Result<DirectoryLock> lock =
        DirectoryLock::Acquire(parent->Join(place.name));
    if (!lock.ok()) return lock.status();
    if (place.journal) {
      TC_RETURN_IF_ERROR(ReplayJournal(lock->directory(), *parent));
    }
    TC_RETURN_IF_ERROR(EmptyDirectory(lock->directory(), kLockFileName));
    if (lock->by_file()) lock->Release();  // its file is in the way
    TC_RETURN_IF_ERROR(parent->RemoveDirectory(place.name, true));
    TC_RETURN_IF_ERROR(parent->Sync());
    acted = true;
  }
  Result<Directory> directory = Directory::Open(absolute);
  if (!directory.ok()) {
    if (directory.status().sys_errno() == ENOENT) return acted;
    return directory.status();
  }
  TC_ASSIGN_OR_RETURN(const bool parts, RemoveDeadParts(*directory));
  return acted || parts;
}

}  // namespace torch_ckpt
