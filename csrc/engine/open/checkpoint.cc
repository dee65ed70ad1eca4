#include "engine/open/checkpoint.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>

#include "engine/open/build_catalog.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/scan.h"
#include "format/names.h"
#include "format/sharding_info.h"
#include "os/path.h"
#include "os/patience.h"
#include "os/probe.h"
#include "runtime/crc32c.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// On a local file system: as long as a commit takes that is in its replay.
constexpr std::chrono::milliseconds kReplayPatience{700};
constexpr int kCheckThreads = 4;
constexpr uint64_t kPeekBytes = 4096;

Status CheckDigests(const ManifestFile& file, ByteSpan bytes) {
  for (size_t i = 0; i < file.crc32c.size(); ++i) {
    const uint64_t begin = i * kSegmentBytes;
    const uint64_t size = std::min(kSegmentBytes, bytes.size() - begin);
    if (Crc32c(0, bytes.data() + begin, size) != file.crc32c[i]) {
      return Corrupt("bytes " + std::to_string(begin) + " to " +
                     std::to_string(begin + size) +
                     " do not match their CRC-32C")
          .WithFile(file.name);
    }
  }
  return {};
}

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
  Result<Directory> staging =
      directory.OpenDirectory(std::string(kStageSuffix));
  if (staging.ok()) {
    Result<std::string> read =
        staging->ReadFile(std::string(kJournalName), kMaxManifestBytes);
    if (read.ok()) {
      out.text = std::move(read).value();
      out.journal = true;
      out.staging = std::move(staging).value();
      return out;
    }
    if (read.status().sys_errno() != ENOENT) return read.status();
  } else if (staging.status().sys_errno() != ENOENT) {
    return staging.status();
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

// The size agrees; the id tells a file of another save with that size.
Status CheckFileId(const File& file, uint64_t bytes, const std::string& id) {
  std::array<std::byte, kPeekBytes> first;
  const uint64_t peek = std::min<uint64_t>(kPeekBytes, bytes);
  TC_RETURN_IF_ERROR(file.ReadExact(MutableByteSpan(first).first(peek), 0));
  if (PeekFileId(ByteSpan(first).first(peek)) == id) return {};
  return Corrupt("belongs to another save").WithFile(file.path());
}

// Whether this may come of another save that has replaced the checkpoint, or
// of a cache that still shows what was there before it. ESTALE: a file was
// removed on the server while it was open here.
bool MayBeReplaced(const Status& status) {
  return status.kind() == ErrorKind::kCorrupt ||
         status.kind() == ErrorKind::kIncomplete ||
         status.sys_errno() == ESTALE;
}

}  // namespace

const char* CheckpointSourceName(CheckpointSource source) {
  switch (source) {
    case CheckpointSource::kManifest:
      return "manifest";
    case CheckpointSource::kIndex:
      return "index";
    case CheckpointSource::kHeaders:
      return "headers";
  }
  return "headers";
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::OfStaged(
    const Directory& staging, Manifest manifest, Catalog catalog) {
  auto checkpoint = std::make_shared<Checkpoint>();
  TC_ASSIGN_OR_RETURN(Directory directory, Directory::Open(staging.path()));
  checkpoint->directory_ =
      std::make_shared<const Directory>(std::move(directory));
  checkpoint->source_ = CheckpointSource::kManifest;
  checkpoint->manifest_ = std::move(manifest);
  checkpoint->catalog_ = std::move(catalog);
  checkpoint->Index();
  return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
}

void Checkpoint::Index() {
  by_name_ = FilesByName(manifest_.files);
  proved_ = std::vector<std::atomic<bool>>(catalog_.entries().size());
}

std::string Checkpoint::CatalogPath() const {
  for (const ManifestFile& file : files()) {
    if (file.role == FileRole::kCatalog) return directory_->Join(file.name);
  }
  return path();
}

Result<std::vector<Placement>> Checkpoint::Placements(uint32_t entry) const {
  Result<std::vector<Placement>> placements =
      catalog_.Placements(entry, files());
  if (!placements.ok()) {
    return Status(placements.status()).WithFile(CatalogPath());
  }
  // Digests say that the catalog is what was written, not that it is true; and
  // what follows relies on boxes that tile.
  const CatalogEntry& e = catalog_.entries()[entry];
  if (e.kind == EntryKind::kObject || proved_[entry]) return placements;
  const Status proved = ProveOwners(e.shape, *placements);
  if (!proved.ok()) {
    return Status(ErrorKind::kCorrupt, proved.message())
        .WithTensor(std::string(e.name))
        .WithFile(CatalogPath());
  }
  proved_[entry] = true;
  return placements;
}

Status Checkpoint::CheckCurrent() const {
  TC_ASSIGN_OR_RETURN(const Committed now, ReadCommitted(*directory_));
  TC_ASSIGN_OR_RETURN(const std::string id, SaveIdOf(now));
  if (id == save_id()) return {};
  return Conflict("is being replaced by a save").WithFile(path());
}

Status Checkpoint::UntilSure(const std::function<Status()>& step) const {
  Status status = step();
  if (!MayBeReplaced(status)) return status;
  // Once for all: who has waited knows what this node sees.
  const bool late = !believes_ && IsShared(*directory_);
  Patience patience(late ? kPatience : std::chrono::milliseconds(0));
  for (;;) {
    const Status current = CheckCurrent();
    if (current.kind() == ErrorKind::kConflict) {
      return Conflict(current.message() + ": " + status.ToString())
          .WithFile(path());
    }
    if (!patience.Wait()) break;
    status = step();
    if (!MayBeReplaced(status)) return status;
  }
  believes_ = true;
  return status;
}

Status Checkpoint::Explain(const Status& status) const {
  return UntilSure([&] { return status; });
}

Result<File> Checkpoint::OpenFile(const std::string& name,
                                  const FileInfo* known) const {
  File file;
  TC_RETURN_IF_ERROR(UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(file, LookForFile(name, known));
    return {};
  }));
  return file;
}

Result<File> Checkpoint::LookForFile(const std::string& name,
                                     const FileInfo* known) const {
  const int64_t position = FindFile(name);
  if (position < 0) {
    return Internal("is not a file of the checkpoint").WithFile(name);
  }
  const ManifestFile& listed = files()[static_cast<size_t>(position)];
  // A replay renames from staging to the target: look there first, so that a
  // rename between the two looks cannot hide the file.
  for (int place = 0; place < 2; ++place) {
    const auto staged = staged_.find(name);
    if (place == 0 && staged == staged_.end()) continue;
    const Directory& where = place == 0 ? *staging_ : *directory_;
    const std::string& as = place == 0 ? staged->second : name;
    Result<File> file = where.OpenFile(as, {});
    if (!file.ok()) {
      const int error = file.status().sys_errno();
      // Staging goes when its commit is through.
      if (error == ENOENT || (place == 0 && error == ESTALE)) continue;
      return file.status();
    }
    TC_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
    if (info.bytes != listed.bytes) {
      return Corrupt("has " + std::to_string(info.bytes) + " bytes, the " +
                     (manifest() ? "manifest" : "header") + " says " +
                     std::to_string(listed.bytes))
          .WithFile(file->path());
    }
    const bool is_known = known && info.SameFile(*known) &&
                          info.modified_ns == known->modified_ns;
    if (!is_known && listed.container == Container::kSafetensors) {
      TC_RETURN_IF_ERROR(CheckFileId(*file, info.bytes, listed.id));
    }
    return file;
  }
  return Incomplete("is missing").WithFile(directory_->Join(name));
}

Status Checkpoint::CheckUnchanged(const std::vector<uint32_t>& files) const {
  if (seen_.empty()) return {};
  // Network file systems answer an open from the server, and stat from what
  // they remember.
  const bool shared = IsShared(*directory_);
  const auto look =
      [&](const std::string& name) -> Result<std::optional<FileInfo>> {
    if (!shared) return directory_->StatName(name);
    TC_ASSIGN_OR_RETURN(const File file, directory_->OpenFile(name, {}));
    TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
    return std::optional<FileInfo>(info);
  };
  for (const uint32_t file : files) {
    const std::string& name = manifest_.files[file].name;
    const auto now = look(name);
    const int error = now.status().sys_errno();
    if (!now.ok() && error != ENOENT && error != ESTALE) return now.status();
    if (now.ok() && *now && (*now)->bytes == seen_[file].bytes &&
        (*now)->modified_ns == seen_[file].modified_ns) {
      continue;
    }
    return Conflict("was written or removed since the checkpoint was opened")
        .WithFile(directory_->Join(name));
  }
  return {};
}

Status Checkpoint::CheckFiles() const {
  return ForEachItem(kCheckThreads, static_cast<int64_t>(files().size()),
                     nullptr, [&](int64_t f, int) -> Status {
                       const auto at = static_cast<size_t>(f);
                       return OpenFile(files()[at].name).status();
                     });
}

Result<std::string> Checkpoint::ReadWhole(const std::string& name) const {
  const int64_t position = FindFile(name);
  if (!manifest() || position < 0) {
    return InvalidArgument("is not named by a manifest").WithFile(name);
  }
  const ManifestFile& listed = files()[static_cast<size_t>(position)];
  std::string text(listed.bytes, '\0');
  TC_RETURN_IF_ERROR(UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(const File file, LookForFile(name, nullptr));
    TC_RETURN_IF_ERROR(file.ReadExact(
        {reinterpret_cast<std::byte*>(text.data()), text.size()}, 0));
    return CheckDigests(listed, AsBytes(text));
  }));
  return text;
}

Status Checkpoint::LoadCommitted(const std::string& text, bool journal) {
  source_ = CheckpointSource::kManifest;
  if (journal) {
    Result<Journal> read = ParseJournal(AsBytes(text));
    if (!read.ok()) {
      return read.status().WithFile(staging_->Join(std::string(kJournalName)));
    }
    Journal parsed = std::move(read).value();
    TC_ASSIGN_OR_RETURN(Directory staging,
                        JournalStaging(*staging_, parsed.manifest));
    staging_ = std::make_shared<const Directory>(std::move(staging));
    for (const JournalRename& rename : parsed.renames) {
      staged_[rename.to] = rename.from;
    }
    manifest_ = std::move(parsed.manifest);
  } else {
    TC_ASSIGN_OR_RETURN(manifest_, ParseManifest(AsBytes(text)));
    if (manifest_.part) return Corrupt("is the manifest of one rank's part");
  }
  by_name_ = FilesByName(manifest_.files);
  TC_ASSIGN_OR_RETURN(catalog_, ReadCatalog(manifest_.files));
  return {};
}

Status Checkpoint::LoadParts(const std::vector<Manifest>& parts) {
  source_ = CheckpointSource::kManifest;
  TC_RETURN_IF_ERROR(CheckParts(parts));
  TC_ASSIGN_OR_RETURN(manifest_, MergeManifests(parts));
  by_name_ = FilesByName(manifest_.files);
  std::vector<CatalogPart> catalogs;
  for (const Manifest& part : parts) {
    TC_ASSIGN_OR_RETURN(Catalog read, ReadCatalog(part.files));
    catalogs.push_back({std::move(read), part.files});
  }
  TC_ASSIGN_OR_RETURN(const CatalogBuilder merged, MergeCatalogs(catalogs));
  TC_ASSIGN_OR_RETURN(std::string encoded, merged.Encode());
  TC_ASSIGN_OR_RETURN(catalog_,
                      Catalog::Parse(std::move(encoded), manifest_.files));
  return {};
}

Result<Catalog> Checkpoint::ReadCatalog(
    const std::vector<ManifestFile>& files) const {
  const ManifestFile* file = nullptr;
  for (const ManifestFile& each : files) {
    if (each.role == FileRole::kCatalog) file = &each;
  }
  if (!file) return Corrupt("the manifest names no catalog");
  if (file->bytes > kMaxCatalogBytes) {
    return Unsupported("the catalog is larger than 1 GiB").WithFile(file->name);
  }
  TC_ASSIGN_OR_RETURN(std::string bytes, ReadWhole(file->name));
  Result<Catalog> parsed = Catalog::Parse(std::move(bytes), files);
  if (!parsed.ok()) return parsed.status().WithFile(file->name);
  return parsed;
}

Status Checkpoint::LoadForeign() {
  TC_ASSIGN_OR_RETURN(ScanResult scan, ScanDirectory(*directory_));
  source_ =
      scan.by_index ? CheckpointSource::kIndex : CheckpointSource::kHeaders;
  manifest_.files = std::move(scan.files);
  catalog_ = std::move(scan.catalog);
  hulls_ = std::move(scan.hulls);
  beside_ = std::move(scan.beside);
  identity_ = std::move(scan.identity);
  seen_ = std::move(scan.infos);
  return {};
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Renamed(
    const std::map<std::string, std::string>& new_names) const {
  auto renamed = std::make_shared<Checkpoint>();
  renamed->directory_ = directory_;
  renamed->staging_ = staging_;
  renamed->staged_ = staged_;
  renamed->source_ = source_;
  renamed->manifest_ = manifest_;
  TC_ASSIGN_OR_RETURN(renamed->catalog_, catalog_.Renamed(new_names, files()));
  renamed->hulls_ = hulls_;
  renamed->beside_ = beside_;
  renamed->identity_ = identity_;
  renamed->seen_ = seen_;
  renamed->Index();
  return std::shared_ptr<const Checkpoint>(std::move(renamed));
}

Checkpoint::Look Checkpoint::LookAt(const std::string& path) {
  Look look;
  look.checkpoint = std::make_shared<Checkpoint>();
  Checkpoint& checkpoint = *look.checkpoint;
  const auto load = [&]() -> Status {
    Result<Directory> opened = Directory::Open(path);
    if (opened.status().sys_errno() == ENOENT) {
      const auto parent = Directory::Open(ParentPath(path));
      look.shared = look.late = parent.ok() && IsShared(*parent);
      return Incomplete("there is no such directory").WithFile(path);
    }
    TC_RETURN_IF_ERROR(opened.status());
    look.shared = IsShared(*opened);
    checkpoint.directory_ =
        std::make_shared<const Directory>(std::move(opened).value());
    const Directory& directory = *checkpoint.directory_;
    TC_ASSIGN_OR_RETURN(Committed committed, ReadCommitted(directory));
    look.text = committed.text;
    look.journal = committed.journal;
    if (!committed.parts.empty()) {
      return checkpoint.LoadParts(committed.parts).WithFile(path);
    }
    if (committed.journal) {
      checkpoint.staging_ =
          std::make_shared<const Directory>(std::move(committed.staging));
    }
    if (look.text) return checkpoint.LoadCommitted(*look.text, look.journal);
    // Data files of a part may be here already, but they do not count yet.
    TC_ASSIGN_OR_RETURN(const bool begun, HasPartStaging(directory));
    if (begun) {
      return Incomplete(
                 "no rank has committed its part: a save without collectives "
                 "is still going on, or died")
          .WithFile(path);
    }
    Status status = checkpoint.LoadForeign();
    // A save may have committed over these files meanwhile: then what was
    // read may be a mixture.
    TC_ASSIGN_OR_RETURN(const Committed again, ReadCommitted(directory));
    if (!again.text) return status;
    look.late = look.changed = true;
    return Conflict("a save has begun to replace it");
  };
  look.status = load();
  if (look.status.sys_errno() == ESTALE) {
    look.shared = look.late = look.changed = true;
  }
  look.late = look.late || look.text.has_value();
  return look;
}

Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path) {
  std::optional<Patience> patience;
  std::optional<std::string> last_text;
  bool changed = false;
  for (;;) {
    Checkpoint::Look look = Checkpoint::LookAt(path);
    if (look.status.ok()) {
      look.checkpoint->Index();
      return std::shared_ptr<const Checkpoint>(std::move(look.checkpoint));
    }
    if (!look.late) return look.status;
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
        return Conflict("is being replaced by a save: " +
                        look.status.ToString())
            .WithFile(path);
      }
      return std::move(look.status)
          .WithFile(path + "/" + std::string(kManifestName));
    }
    last_text = std::move(look.text);
  }
}

Result<Directory> JournalStaging(const Directory& root,
                                 const Manifest& manifest) {
  Result<Directory> staging = root.OpenDirectory(manifest.save_id);
  if (staging.status().sys_errno() != ENOENT) return staging;
  return Directory::Open(root.path());
}

}  // namespace torch_ckpt
