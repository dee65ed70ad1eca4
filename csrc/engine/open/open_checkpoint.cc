// How a checkpoint is found at a path and read; checkpoint.cc has what an
// opened one answers.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "engine/open/build_catalog.h"
#include "engine/open/catalog_reader.h"
#include "engine/open/checkpoint.h"
#include "engine/open/header_io.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/read_dcp.h"
#include "format/names.h"
#include "os/path.h"
#include "os/patience.h"
#include "os/probe.h"

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
  if (error == ENOTDIR) {
    return Corrupt(
               "is a symbolic link or a file where saves of torch_ckpt stage, "
               "and is not followed: remove it if no save of yours made it")
        .WithFile(directory.Join(std::string(kStageSuffix)));
  }
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
  out.common = std::move(scan.common);
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

// Whether it begins as objects files of ours do. What a copy that stopped has
// left of one may be less, and nothing at all.
Result<bool> IsObjectsFile(const Directory& directory,
                           const std::string& name) {
  constexpr std::string_view kBegin = "{\"format_version\":";
  const Result<File> file = directory.OpenFile(name, {});
  if (file.status().kind() == ErrorKind::kCorrupt) return false;  // no file
  TC_RETURN_IF_ERROR(file.status());
  std::array<std::byte, kBegin.size()> begin;
  TC_ASSIGN_OR_RETURN(const uint64_t count, file->Read(begin, 0));
  return kBegin.starts_with(
      std::string_view(reinterpret_cast<const char*>(begin.data()), count));
}

// What only the manifest can say belongs together: read without it, tensors
// would lack digests, and other leaves would be gone.
Status CutOff(const Directory& directory, const std::string& name) {
  return Incomplete(
             "is a part of a checkpoint of torch_ckpt, whose " +
             std::string(kManifestName) +
             " is not there: copy that too, with all that stands beside it; "
             "format=\"" +
             std::string(kWholeFormat) +
             "\" reads the bare tensors, of which nothing is verified")
      .WithFile(directory.Join(name));
}

Status CheckNotCutOff(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  for (const std::string& name : names) {
    const auto rank = RankOfFile(name);
    bool ours = name == kCatalogName || (rank && name.ends_with(".catalog"));
    if (!ours && rank && name == ObjectFileName(*rank)) {
      // Others may call a file so.
      TC_ASSIGN_OR_RETURN(ours, IsObjectsFile(directory, name));
    }
    if (ours) return CutOff(directory, name);
  }
  return {};
}

// The same of shards, beside which others may be missing; final files say
// themselves how many they are. Of those that were read the ids are known; of
// what could not be read one is looked at.
Status CheckNoShards(const Directory& directory,
                     const Result<Contents>& loaded) {
  if (loaded.ok()) {
    for (const ManifestFile& file : loaded->files->files()) {
      if (IsShardName(file.name) && !file.id.empty()) {
        return CutOff(directory, file.name);
      }
    }
    return {};
  }
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  const auto shard = std::find_if(names.begin(), names.end(), IsShardName);
  if (shard == names.end() || PeekFileIdOf(directory, *shard).empty()) {
    return {};
  }
  return CutOff(directory, *shard);
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
    Status cut_off = CheckNotCutOff(*directory);
    Result<Contents> loaded = cut_off.ok()
                                  ? LoadForeign(directory, nullptr, format)
                                  : Result<Contents>(cut_off);
    if (cut_off.ok()) cut_off = CheckNoShards(*directory, loaded);
    if (!cut_off.ok()) loaded = cut_off;
    look.late = look.shared && !cut_off.ok();
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
