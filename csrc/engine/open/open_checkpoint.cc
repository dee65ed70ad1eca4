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
#include "engine/open/committed.h"
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

using DirectoryPtr = std::shared_ptr<const Directory>;
using Contents = Checkpoint::Contents;

// All but the catalog. `replaced_in`: where saves take the place of the files;
// null: nowhere, as of those that were asked for by their own name or format.
Contents ContentsOf(Manifest manifest, FileList list,
                    const DirectoryPtr& replaced_in) {
  Contents out;
  out.save_id = out.identity = std::move(manifest.save_id);
  out.world_size = manifest.world_size;
  out.metadata = std::move(manifest.metadata);
  list.files = std::move(manifest.files);
  if (replaced_in) {
    list.check_current = [replaced_in, id = out.save_id] {
      return CheckSave(*replaced_in, id);
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

Result<Contents> LoadCommitted(const DirectoryPtr& directory,
                               CommittedFiles named) {
  FileList list{directory, {}};
  list.staging = std::move(named.staging);
  list.staged = std::move(named.staged);
  Contents out =
      ContentsOf(std::move(named.manifest), std::move(list), directory);
  TC_ASSIGN_OR_RETURN(out.catalog, ReadCatalog(*out.files, out.files->files()));
  return out;
}

// What `above` has in `directory`, as if that held nothing else: its files by
// their names there, and the entries that lie in them.
Result<Contents> LoadBelow(const DirectoryPtr& directory,
                           const CheckpointAbove& above) {
  TC_ASSIGN_OR_RETURN(CommittedFiles named,
                      FilesOf(*above.directory, above.committed));
  TC_ASSIGN_OR_RETURN(const Contents whole,
                      LoadCommitted(above.directory, named));
  const std::string prefix = above.name + "/";
  std::vector<uint32_t> kept;  // numbers in the whole
  std::vector<ManifestFile> files;
  for (uint32_t f = 0; f < named.manifest.files.size(); ++f) {
    ManifestFile& file = named.manifest.files[f];
    if (!file.name.starts_with(prefix)) continue;
    file.name.erase(0, prefix.size());
    files.push_back(std::move(file));
    kept.push_back(f);
  }
  named.manifest.files = std::move(files);
  FileList list{directory, {}};
  list.staging = std::move(named.staging);
  for (auto& [path, staged] : named.staged) {
    if (!path.starts_with(prefix)) continue;
    list.staged[path.substr(prefix.size())] = std::move(staged);
  }
  Contents out =
      ContentsOf(std::move(named.manifest), std::move(list), above.directory);
  out.identity += "/" + above.name;
  TC_ASSIGN_OR_RETURN(
      out.catalog,
      whole.catalog.InFiles(kept, whole.files->files(), out.files->files()));
  const auto& left = out.files->files();
  const auto& entries = out.catalog.entries();
  const bool has_data = std::any_of(
      left.begin(), left.end(),
      [](const ManifestFile& file) { return file.role == FileRole::kData; });
  const bool has_tensors = std::any_of(
      entries.begin(), entries.end(), [](const CatalogEntry& entry) {
        return entry.kind == EntryKind::kTensor;
      });
  // Its files are being removed, or their tensors are elsewhere by now, as
  // after a consolidation that has left the shards.
  if (left.empty() || (has_data && !has_tensors)) {
    return Incomplete("has no tensor of the checkpoint above it any more")
        .WithFile(directory->path());
  }
  return out;
}

Result<Contents> LoadParts(const DirectoryPtr& directory,
                           const std::vector<Manifest>& parts) {
  TC_RETURN_IF_ERROR(CheckParts(parts));
  TC_ASSIGN_OR_RETURN(Manifest manifest, MergeManifests(parts));
  Contents out = ContentsOf(std::move(manifest), {directory, {}}, directory);
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
  Contents out = ContentsOf(std::move(manifest), std::move(list),
                            !file && format.empty() ? directory : nullptr);
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
  std::string manifest;             // where it is, or would be
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

// Of a directory in which nothing of ours names any file.
Result<Contents> LoadUnnamed(const DirectoryPtr& directory,
                             const std::string& path, std::string_view format,
                             Look* look) {
  // Data files of a part may be here already, but they do not count yet.
  TC_ASSIGN_OR_RETURN(const bool begun, HasPartStaging(*directory));
  if (begun) {
    return Incomplete(
               "no rank has committed its part: a save without collectives "
               "is still going on, or died")
        .WithFile(path);
  }
  if (format == kOurFormat) {
    return Incomplete("holds no " + std::string(kManifestName)).WithFile(path);
  }
  Status cut_off = CheckNotCutOff(*directory);
  Result<Contents> loaded = cut_off.ok()
                                ? LoadForeign(directory, nullptr, format)
                                : Result<Contents>(cut_off);
  if (cut_off.ok()) cut_off = CheckNoShards(*directory, loaded);
  if (!cut_off.ok()) loaded = cut_off;
  look->late = look->shared && !cut_off.ok();
  // A save may have committed over these files meanwhile: then what was
  // read may be a mixture.
  TC_ASSIGN_OR_RETURN(const Committed again, ReadCommitted(*directory));
  TC_ASSIGN_OR_RETURN(const auto above, FindAbove(*directory));
  if (!again.text && !above) return loaded;
  look->late = look->changed = true;
  return Conflict("a save has begun to replace it");
}

Look LookAt(const std::string& path, std::string_view format) {
  const std::string name(kManifestName);
  Look look;
  look.manifest = path + "/" + name;
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
    std::optional<CheckpointAbove> above;
    if (!committed.text) {
      look.late = look.shared;  // an error may be of an old view
      TC_ASSIGN_OR_RETURN(above, FindAbove(*directory));
      look.late = false;
      if (above) look.manifest = above->directory->Join(name);
    }
    const Committed& found = above ? above->committed : committed;
    look.text = found.text;
    look.journal = found.journal;
    // While a journal is there, it may be about to remove the other one.
    if (look.text && !look.journal && format.empty()) {
      TC_RETURN_IF_ERROR(CheckAlone(*directory));
    }
    if (above) return LoadBelow(directory, *above);
    if (!committed.parts.empty()) {
      Result<Contents> loaded = LoadParts(directory, committed.parts);
      if (!loaded.ok()) return loaded.status().WithFile(path);
      return loaded;
    }
    if (look.text) {
      TC_ASSIGN_OR_RETURN(CommittedFiles named, FilesOf(*directory, committed));
      return LoadCommitted(directory, std::move(named));
    }
    return LoadUnnamed(directory, path, format, &look);
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
      return std::move(status).WithFile(look.manifest);
    }
    last_text = std::move(look.text);
  }
}

}  // namespace torch_ckpt
