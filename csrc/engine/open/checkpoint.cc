#include "engine/open/checkpoint.h"

#include <cerrno>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "engine/open/build_catalog.h"
#include "engine/open/catalog_reader.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/read_dcp.h"
#include "engine/open/torch_archive.h"
#include "format/names.h"
#include "os/path.h"
#include "os/patience.h"
#include "os/probe.h"
#include "plan/runs.h"

namespace torch_ckpt {
namespace {

// On a local file system: as long as a commit takes that is in its replay.
constexpr std::chrono::milliseconds kReplayPatience{700};

// What says which files count: a journal while it stands, else the manifest,
// else the part manifests.
struct Committed {
  std::optional<std::string> text;  // nullopt: none of them
  bool journal = false;
  Directory staging;            // of the journal
  std::vector<Manifest> parts;  // `text` is their save id
};

Result<Committed> ReadCommitted(const Directory& directory) {
  Committed out;
  const auto look = [&]() -> Result<std::optional<FoundJournal>> {
    TC_ASSIGN_OR_RETURN(const Directory place,
                        directory.OpenDirectory(std::string(kStageSuffix)));
    return FindJournal(place);
  };
  Result<std::optional<FoundJournal>> journal = look();
  // Where only their owner may look, the manifest and the ids of the files say
  // enough: what they tell to be whole is.
  const int error = journal.status().sys_errno();
  if (!journal.ok() && error != ENOENT && error != EACCES) {
    return journal.status();
  }
  if (journal.ok() && *journal) {
    out.text = std::move((*journal)->text);
    out.journal = true;
    out.staging = std::move((*journal)->staging);
    return out;
  }
  Result<std::string> read =
      directory.ReadFile(std::string(kManifestName), kMaxManifestBytes);
  if (read.ok()) {
    out.text = std::move(read).value();
    return out;
  }
  if (read.status().sys_errno() != ENOENT) return read.status();
  TC_ASSIGN_OR_RETURN(out.parts, ReadParts(directory));
  if (!out.parts.empty()) out.text = PartsSaveId(out.parts);
  return out;
}

Result<std::string> SaveIdOf(const Committed& committed) {
  if (!committed.text) return std::string();
  if (!committed.parts.empty()) return *committed.text;
  if (committed.journal) {
    TC_ASSIGN_OR_RETURN(const Journal journal,
                        ParseJournal(AsBytes(*committed.text)));
    return journal.manifest.save_id;
  }
  TC_ASSIGN_OR_RETURN(const Manifest manifest,
                      ParseManifest(AsBytes(*committed.text)));
  return manifest.save_id;
}

// kConflict when `id` is not the save that stands in the directory by now.
Status CheckSave(const Directory& directory, const std::string& id) {
  TC_ASSIGN_OR_RETURN(const Committed now, ReadCommitted(directory));
  TC_ASSIGN_OR_RETURN(const std::string current, SaveIdOf(now));
  if (current == id) return {};
  return Conflict("is being replaced by a save").WithFile(directory.path());
}

using DirectoryPtr = std::shared_ptr<const Directory>;
using Contents = Checkpoint::Contents;

// All but the catalog. Saves take the place of files in `directory`, but not of
// those that were asked for by their own name or format.
Contents FilesOf(Manifest manifest, FileList list, bool replaceable = true) {
  Contents out;
  out.save_id = out.identity = std::move(manifest.save_id);
  out.world_size = manifest.world_size;
  list.files = std::move(manifest.files);
  if (replaceable) {
    list.check_current = [directory = list.directory, id = out.save_id] {
      return CheckSave(*directory, id);
    };
  }
  out.files = std::make_shared<const FileSet>(std::move(list));
  return out;
}

// The one catalog among `files`, which are all of the set or those of a part.
Result<Catalog> ReadCatalog(const FileSet& set,
                            const std::vector<ManifestFile>& files) {
  const ManifestFile* file = nullptr;
  for (const ManifestFile& each : files) {
    if (each.role == FileRole::kCatalog) file = &each;
  }
  if (!file) return Corrupt("the manifest names no catalog");
  if (file->bytes > kMaxCatalogBytes) {
    return Unsupported("the catalog is larger than 1 GiB").WithFile(file->name);
  }
  const auto at = static_cast<uint32_t>(set.FindFile(file->name));
  TC_ASSIGN_OR_RETURN(std::string bytes, set.ReadWhole(at));
  Result<Catalog> parsed = Catalog::Parse(std::move(bytes), files);
  if (!parsed.ok()) return parsed.status().WithFile(file->name);
  return parsed;
}

Result<Contents> LoadManifest(const DirectoryPtr& directory,
                              const std::string& text) {
  TC_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(AsBytes(text)));
  if (manifest.part) return Corrupt("is the manifest of one rank's part");
  Contents out = FilesOf(std::move(manifest), {directory, {}});
  TC_ASSIGN_OR_RETURN(out.catalog, ReadCatalog(*out.files, out.files->files()));
  return out;
}

Result<Contents> LoadJournal(const DirectoryPtr& directory, Directory staging,
                             const std::string& text) {
  Result<Journal> journal = ParseJournal(AsBytes(text));
  if (!journal.ok()) {
    return journal.status().WithFile(staging.Join(std::string(kJournalName)));
  }
  if (journal->IsRemoval()) {
    return Incomplete(
               "is being removed, or the removal was interrupted: remove it "
               "again, or recover it, to carry that out")
        .WithFile(directory->path());
  }
  FileList list{directory, {}};
  list.staging = std::make_shared<const Directory>(std::move(staging));
  for (const JournalRename& rename : journal->renames) {
    list.staged[rename.to] = rename.from;
  }
  Contents out = FilesOf(std::move(journal->manifest), std::move(list));
  TC_ASSIGN_OR_RETURN(out.catalog, ReadCatalog(*out.files, out.files->files()));
  return out;
}

Result<Contents> LoadParts(const DirectoryPtr& directory,
                           const std::vector<Manifest>& parts) {
  TC_RETURN_IF_ERROR(CheckParts(parts));
  TC_ASSIGN_OR_RETURN(Manifest manifest, MergeManifests(parts));
  Contents out = FilesOf(std::move(manifest), {directory, {}});
  std::vector<CatalogPart> catalogs;
  for (const Manifest& part : parts) {
    TC_ASSIGN_OR_RETURN(Catalog read, ReadCatalog(*out.files, part.files));
    catalogs.push_back({std::move(read), part.files});
  }
  TC_ASSIGN_OR_RETURN(CatalogBuilder merged, MergeCatalogs(catalogs));
  TC_ASSIGN_OR_RETURN(out.catalog,
                      Catalog::From(std::move(merged), out.files->files()));
  return out;
}

// `file`: null for all of the directory.
Result<Contents> LoadForeign(const DirectoryPtr& directory,
                             const std::string* file, std::string_view format) {
  TC_ASSIGN_OR_RETURN(ForeignCatalog scan,
                      ReadForeign(*directory, file, format));
  FileList list{directory, {}};
  list.has_digests = false;
  list.seen = std::move(scan.infos);
  Manifest manifest;  // of the files alone
  manifest.world_size = 0;
  manifest.files = std::move(scan.files);
  Contents out =
      FilesOf(std::move(manifest), std::move(list), !file && format.empty());
  out.catalog = std::move(scan.catalog);
  out.source = scan.source;
  out.format = scan.format;
  out.identity = std::move(scan.identity);
  out.hulls = std::move(scan.hulls);
  out.beside = std::move(scan.beside);
  out.notes = std::move(scan.notes);
  out.archives = std::move(scan.archives);
  out.storages = std::move(scan.storages);
  out.made_objects = std::move(scan.made_objects);
  out.unread = std::move(scan.unread);
  return out;
}

// Of a directory with a checkpoint of ours, where nobody has said which of two
// is meant. By time alone neither is the newer one: copies have other times.
Status CheckAlone(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> others,
                      FindStockMetadata(directory));
  if (others.empty()) return {};
  return Conflict("holds two checkpoints: one of torch_ckpt, and " + others[0] +
                  " of stock DCP; say which is meant, by format=\"" +
                  std::string(kOurFormat) +
                  "\" or format=\"dcp\", or move the other one elsewhere")
      .WithFile(directory.path());
}

// What only the manifest can say belongs together: read without it, tensors
// would lack digests, and other leaves would be gone.
Status CheckNotCutOff(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  for (const std::string& name : names) {
    const auto rank = RankOfFile(name);
    const bool ours =
        name == kCatalogName ||
        (rank && (name == ObjectFileName(*rank) || name.ends_with(".catalog")));
    if (!ours) continue;
    return Incomplete(
               "is a part of a checkpoint of torch_ckpt, whose " +
               std::string(kManifestName) +
               " is not there: copy that too, with all that stands beside it; "
               "format=\"" +
               std::string(kWholeFormat) +
               "\" reads the bare tensors, of which nothing is verified")
        .WithFile(directory.Join(name));
  }
  return {};
}

// One look at a directory.
struct Look {
  Result<Contents> found = Contents();
  std::optional<std::string> text;  // of what names its files
  bool journal = false;             // `text` is one
  bool changed = false;             // under the look
  bool shared = false;              // IsShared
  bool late = false;                // an error may go with another look
};

// What is at a path that opens as no directory, for the reason `why`.
Result<Contents> LoadFile(const std::string& path, std::string_view format,
                          const Status& why, Look* look) {
  TC_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(path));
  Result<Directory> parent = Directory::Open(ParentPath(absolute));
  look->shared = parent.ok() && IsShared(*parent);
  if (why.sys_errno() == ENOENT) {
    look->late = look->shared;
    return Incomplete("there is no such file or directory").WithFile(path);
  }
  if (why.sys_errno() != ENOTDIR || !parent.ok()) return why;
  const std::string name = BaseName(absolute);
  return LoadForeign(
      std::make_shared<const Directory>(std::move(parent).value()), &name,
      format);
}

Look LookAt(const std::string& path, std::string_view format) {
  Look look;
  const auto load = [&]() -> Result<Contents> {
    Result<Directory> opened = Directory::Open(path);
    if (!opened.ok()) return LoadFile(path, format, opened.status(), &look);
    look.shared = IsShared(*opened);
    const auto directory =
        std::make_shared<const Directory>(std::move(opened).value());
    if (!format.empty() && format != kOurFormat) {
      return LoadForeign(directory, nullptr, format);
    }
    TC_ASSIGN_OR_RETURN(Committed committed, ReadCommitted(*directory));
    look.text = committed.text;
    look.journal = committed.journal;
    // While a journal is there, it may be about to remove the other one.
    if (look.text && !look.journal && format.empty()) {
      TC_RETURN_IF_ERROR(CheckAlone(*directory));
    }
    if (!committed.parts.empty()) {
      Result<Contents> loaded = LoadParts(directory, committed.parts);
      if (!loaded.ok()) return loaded.status().WithFile(path);
      return loaded;
    }
    if (look.journal) {
      return LoadJournal(directory, std::move(committed.staging), *look.text);
    }
    if (look.text) return LoadManifest(directory, *look.text);
    // Data files of a part may be here already, but they do not count yet.
    TC_ASSIGN_OR_RETURN(const bool begun, HasPartStaging(*directory));
    if (begun) {
      return Incomplete(
                 "no rank has committed its part: a save without collectives "
                 "is still going on, or died")
          .WithFile(path);
    }
    if (format == kOurFormat) {
      return Incomplete("holds no " + std::string(kManifestName))
          .WithFile(path);
    }
    const Status cut_off = CheckNotCutOff(*directory);
    look.late = look.shared && !cut_off.ok();
    Result<Contents> loaded = cut_off.ok()
                                  ? LoadForeign(directory, nullptr, format)
                                  : Result<Contents>(cut_off);
    // A save may have committed over these files meanwhile: then what was
    // read may be a mixture.
    TC_ASSIGN_OR_RETURN(const Committed again, ReadCommitted(*directory));
    if (!again.text) return loaded;
    look.late = look.changed = true;
    return Conflict("a save has begun to replace it");
  };
  look.found = load();
  if (look.found.status().sys_errno() == ESTALE) {
    look.shared = look.late = look.changed = true;
  }
  look.late = look.late || look.text.has_value();
  return look;
}

}  // namespace

Checkpoint::Checkpoint(Contents contents)
    : has_(std::move(contents)), proved_(has_.catalog.entries().size()) {}

std::string_view Checkpoint::format() const {
  if (!has_.format.empty()) return has_.format;
  const bool whole = std::none_of(
      files().begin(), files().end(), [](const ManifestFile& file) {
        return file.role == FileRole::kData && IsShardName(file.name);
      });
  const bool any = std::any_of(
      files().begin(), files().end(),
      [](const ManifestFile& file) { return file.role == FileRole::kData; });
  return whole && any ? kWholeFormat : kOurFormat;
}

std::string Checkpoint::CatalogPath() const {
  for (const ManifestFile& file : files()) {
    if (file.role == FileRole::kCatalog) return path() + "/" + file.name;
  }
  return path();
}

bool Checkpoint::MayBePart(std::span<const Placement> placements) const {
  return !has_.archives.empty() &&
         std::all_of(placements.begin(), placements.end(),
                     [&](const Placement& placement) {
                       return placement.kind == PlacementKind::kStridedBox;
                     });
}

Status Checkpoint::ProveTiled(uint32_t entry,
                              std::span<const Placement> placements) const {
  const CatalogEntry& e = catalog().entries()[entry];
  std::atomic<bool>& is_proved = proved_[catalog().TensorOf(entry)];
  if (e.kind == EntryKind::kObject || is_proved) return {};
  const Status proved = ProveOwners(e.shape, placements);
  if (!proved.ok() && MayBePart(placements)) {
    const uint32_t file =
        placements.empty() ? has_.archives[0].file : placements[0].file;
    return Incomplete("is a DTensor of which one rank saved its part: " +
                      proved.message())
        .WithTensor(std::string(e.name))
        .WithFile(path() + "/" + files()[file].name);
  }
  if (!proved.ok()) {
    return Status(ErrorKind::kCorrupt, proved.message())
        .WithTensor(std::string(e.name))
        .WithFile(CatalogPath());
  }
  is_proved = true;
  return {};
}

std::string_view Checkpoint::StoredName(uint32_t entry) const {
  const std::string_view name = catalog().entries()[entry].name;
  const auto renamed = has_.stored_names.find(name);
  return renamed == has_.stored_names.end() ? name : renamed->second;
}

const UnreadTensor* Checkpoint::FindUnread(uint32_t entry) const {
  if (has_.unread.empty()) return nullptr;
  const auto found = has_.unread.find(StoredName(entry));
  return found == has_.unread.end() ? nullptr : &found->second;
}

Status Checkpoint::CheckRead(uint32_t entry) const {
  const UnreadTensor* unread = FindUnread(entry);
  if (!unread) return {};
  return Unsupported(unread->reason + ", and is not read")
      .WithTensor(std::string(catalog().entries()[entry].name))
      .WithFile(path());
}

Result<Checkpoint::Resolved> Checkpoint::Resolve(
    uint32_t entry, const Placement& archive) const {
  const CatalogEntry& e = catalog().entries()[entry];
  Resolved found;
  const auto look = [&](const File& file) -> Status {
    TC_ASSIGN_OR_RETURN(const bool zip, IsTorchArchive(file, archive.offset));
    if (!zip) {
      TC_ASSIGN_OR_RETURN(
          found.placement,
          blobs_.Resolve(file, archive, StoredName(entry), e.dtype));
      return {};
    }
    TC_ASSIGN_OR_RETURN(TorchArchive::Found in_archive,
                        ResolveArchive(file, archive, e.dtype));
    found = {std::move(in_archive.placement), in_archive.storage};
    return {};
  };
  const Status resolved = file_set()->UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(const File file, file_set()->OpenFile(archive.file));
    const Status looked = look(file);
    if (looked.ok()) return {};
    return Status(looked).WithFile(file.path() + " from byte " +
                                   std::to_string(archive.offset) + " on");
  });
  if (!resolved.ok()) return Status(resolved).WithTensor(std::string(e.name));
  return found;
}

void Checkpoint::AddStorageOf(const Placement& placement,
                              std::vector<DigestedRange>* storages) const {
  // The last one that begins at or before it.
  const auto after =
      std::upper_bound(has_.storages.begin(), has_.storages.end(), placement,
                       [](const Placement& p, const DigestedRange& each) {
                         return std::pair(p.file, p.offset) <
                                std::pair(each.file, each.range.offset);
                       });
  if (after == has_.storages.begin()) return;
  const DigestedRange& storage = *(after - 1);
  if (storage.file == placement.file &&
      placement.offset < storage.range.offset + storage.range.bytes) {
    storages->push_back(storage);
  }
}

Result<std::vector<Placement>> Checkpoint::Placements(
    uint32_t entry, const Box* needed,
    std::vector<DigestedRange>* storages) const {
  TC_RETURN_IF_ERROR(CheckRead(entry));
  Result<std::vector<Placement>> placements =
      catalog().Placements(entry, files());
  if (!placements.ok()) {
    return Status(placements.status()).WithFile(CatalogPath());
  }
  // Digests say that the catalog is what was written, not that it is true; and
  // what follows relies on boxes that tile.
  TC_RETURN_IF_ERROR(ProveTiled(entry, *placements));
  if (needed) {
    std::erase_if(*placements, [&](const Placement& placement) {
      return placement.kind != PlacementKind::kRange &&
             Intersect(placement.box, *needed).Empty();
    });
  }
  for (Placement& placement : *placements) {
    if (placement.kind == PlacementKind::kArchive) {
      TC_ASSIGN_OR_RETURN(Resolved found, Resolve(entry, placement));
      placement = std::move(found.placement);
      if (storages && found.storage.crc32 != 0) {
        storages->push_back(found.storage);
      }
    } else if (storages) {
      AddStorageOf(placement, storages);
    }
  }
  return placements;
}

Result<std::vector<Placement>> Checkpoint::DescribedPlacements(
    uint32_t entry) const {
  Result<std::vector<Placement>> placements =
      catalog().Placements(entry, files());
  if (placements.ok() && MayBePart(*placements)) return placements;
  return Placements(entry);
}

Result<std::vector<Checkpoint::Archive>> Checkpoint::Archives() const {
  std::vector<Archive> out;
  // Objects may share one.
  std::set<std::pair<uint32_t, uint64_t>> known;
  const auto add = [&](uint32_t file, FileRange range) {
    if (range.bytes == 0 || !known.emplace(file, range.offset).second) return;
    Archive& archive = out.emplace_back();
    archive.placement.kind = PlacementKind::kArchive;
    archive.placement.file = file;
    archive.placement.offset = range.offset;
    archive.placement.bytes = range.bytes;
  };
  for (const TorchArchivePlace& each : has_.archives) {
    add(each.file, each.range);
  }
  const std::vector<CatalogEntry>& entries = catalog().entries();
  for (uint32_t e = 0; e < entries.size(); ++e) {
    if (entries[e].archived) add(entries[e].file, entries[e].archived->archive);
    if (entries[e].kind != EntryKind::kTensor) continue;
    TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                        catalog().Placements(e, files()));
    for (const Placement& placement : placements) {
      if (placement.kind == PlacementKind::kArchive) {
        out.push_back({placement, e});
      }
    }
  }
  return out;
}

Result<std::vector<Result<std::string>>> Checkpoint::ArchivedObjects(
    std::span<const uint32_t> wanted) const {
  const std::vector<CatalogEntry>& entries = catalog().entries();
  std::vector<Result<std::string>> out(wanted.size(), std::string());
  // By archive, so that each is read once: the positions in `wanted`.
  std::map<std::pair<uint32_t, uint64_t>, std::vector<size_t>> archives;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const CatalogEntry& entry = entries[wanted[i]];
    const auto made = has_.made_objects.find(StoredName(wanted[i]));
    if (FindUnread(wanted[i])) {
      out[i] = CheckRead(wanted[i]);
    } else if (made != has_.made_objects.end()) {
      out[i] = made->second;
    } else {
      archives[{entry.file, entry.archived->archive.offset}].push_back(i);
    }
  }
  std::vector<uint32_t> read;
  for (const auto& [place, members] : archives) {
    const uint32_t number = place.first;
    const FileRange range = entries[wanted[members[0]]].archived->archive;
    std::vector<uint64_t> leaves;
    for (const size_t i : members) {
      leaves.push_back(entries[wanted[i]].archived->leaf);
    }
    std::vector<Result<std::string>> objects;
    const Status looked = file_set()->UntilSure([&]() -> Status {
      TC_ASSIGN_OR_RETURN(const File file, file_set()->OpenFile(number));
      auto found = ReadArchivedObjects(file, range, leaves);
      if (!found.ok()) return found.status().WithFile(file.path());
      objects = std::move(found).value();
      return {};
    });
    for (size_t m = 0; m < members.size(); ++m) {
      const Status status = looked.ok() ? objects[m].status() : looked;
      Result<std::string>* const object = &out[members[m]];
      if (status.ok()) {
        *object = std::move(objects[m]);
      } else {
        *object = Status(status)
                      .WithTensor(std::string(entries[wanted[members[m]]].name))
                      .WithFile(path() + "/" + files()[number].name);
      }
    }
    read.push_back(number);
  }
  TC_RETURN_IF_ERROR(file_set()->CheckUnchanged(read));
  return out;
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Without(
    const std::set<std::string, std::less<>>& names) const {
  Contents left = has_;
  TC_ASSIGN_OR_RETURN(left.catalog, catalog().Without(names, files()));
  return std::make_shared<const Checkpoint>(std::move(left));
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Renamed(
    const std::map<std::string, std::string>& new_names) const {
  Contents renamed = has_;
  TC_ASSIGN_OR_RETURN(renamed.catalog, catalog().Renamed(new_names, files()));
  for (const auto& each : new_names) renamed.stored_names.erase(each.first);
  for (const auto& [name, new_name] : new_names) {
    const auto before = has_.stored_names.find(name);
    renamed.stored_names[new_name] =
        before == has_.stored_names.end() ? name : before->second;
  }
  return std::make_shared<const Checkpoint>(std::move(renamed));
}

Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path, std::string_view format) {
  if (format == kWholeFormat) {
    // Whole files of ours have digests and other leaves: as by themselves.
    auto ours = OpenCheckpoint(path, kOurFormat);
    if (ours.ok() && (*ours)->format() == format) return ours;
  }
  std::optional<Patience> patience;
  std::optional<std::string> last_text;
  bool changed = false;
  for (;;) {
    Look look = LookAt(path, format);
    if (look.found.ok()) {
      return std::make_shared<const Checkpoint>(std::move(look.found).value());
    }
    Status status = look.found.status();
    if (!look.late) return status;
    // A commit may have gone on between two looks: look again. Damage looks
    // the same every time, but on a shared file system so does what another
    // node has replaced, for a while.
    const bool again = patience.has_value();
    if (!again) patience.emplace(look.shared ? kPatience : kReplayPatience);
    changed = changed || look.changed || (again && look.text != last_text);
    const bool settled = again && look.text == last_text && !look.journal &&
                         !look.changed && !look.shared;
    if (settled || !patience->Wait()) {
      if (changed) {
        return Conflict("is being replaced by a save: " + status.ToString())
            .WithFile(path);
      }
      return std::move(status).WithFile(path + "/" +
                                        std::string(kManifestName));
    }
    last_text = std::move(look.text);
  }
}

Result<std::optional<FoundJournal>> FindJournal(const Directory& place) {
  Result<Directory> staging = place.OpenDirectory(std::string(kCommittedName));
  if (staging.ok()) {
    Result<std::string> text = staging->ReadFile(
        std::string(kJournalName), kMaxManifestBytes, {.no_follow = true});
    if (text.ok()) {
      return std::optional(
          FoundJournal{std::move(staging).value(), std::move(text).value()});
    }
    if (text.status().sys_errno() != ENOENT) return text.status();
  } else if (staging.status().sys_errno() != ENOENT &&
             staging.status().sys_errno() != ENOTDIR) {
    return staging.status();
  }
  return std::optional<FoundJournal>();
}

}  // namespace torch_ckpt
