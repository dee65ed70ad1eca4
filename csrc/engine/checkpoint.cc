#include "engine/checkpoint.h"

#include <array>
#include <chrono>
#include <thread>

#include "engine/scan.h"
#include "format/names.h"
#include "format/sharding_info.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

constexpr int kTries = 5;
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

}  // namespace

const char* CheckpointSourceName(CheckpointSource source) {
  switch (source) {
    case CheckpointSource::kManifest: return "manifest";
    case CheckpointSource::kIndex: return "index";
    case CheckpointSource::kHeaders: return "headers";
  }
  return "headers";
}

Result<File> Checkpoint::OpenFile(const std::string& name, bool direct) const {
  const ManifestFile* listed = manifest_ ? manifest_->Find(name) : nullptr;
  if (manifest_ && !listed) {
    return Internal("is not named by the manifest").WithFile(name);
  }
  // A replay renames from staging to the target: look there first, so that a
  // rename between the two looks cannot hide the file.
  for (int place = 0; place < 2; ++place) {
    const auto staged = staged_.find(name);
    if (place == 0 && staged == staged_.end()) continue;
    const Directory& where = place == 0 ? staging_ : directory_;
    const std::string& as = place == 0 ? staged->second : name;
    Result<File> file = where.OpenFile(as, {.direct = direct});
    if (!file.ok()) {
      if (file.status().sys_errno() == ENOENT) continue;
      return file.status();
    }
    if (!listed) return file;
    TC_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
    if (info.bytes != listed->bytes) {
      return Corrupt("has " + std::to_string(info.bytes) +
                     " bytes, the manifest says " +
                     std::to_string(listed->bytes))
          .WithFile(file->path());
    }
    return file;
  }
  return Incomplete("is missing").WithFile(directory_.Join(name));
}

Result<std::string> Checkpoint::ReadWhole(const std::string& name) const {
  const ManifestFile* listed = manifest_ ? manifest_->Find(name) : nullptr;
  if (!listed) {
    return InvalidArgument("is not named by a manifest").WithFile(name);
  }
  TC_ASSIGN_OR_RETURN(File file, OpenFile(name, false));
  std::string text(listed->bytes, '\0');
  TC_RETURN_IF_ERROR(file.ReadExact(
      {reinterpret_cast<std::byte*>(text.data()), text.size()}, 0));
  Status digests = CheckDigests(*listed, AsBytes(text));
  if (!digests.ok()) return digests;
  return text;
}

Status Checkpoint::LoadCommitted(const std::string& text, bool journal) {
  source_ = CheckpointSource::kManifest;
  if (journal) {
    TC_ASSIGN_OR_RETURN(Journal parsed, ParseJournal(AsBytes(text)));
    for (const JournalRename& rename : parsed.renames) {
      staged_[rename.to] = rename.from;
    }
    manifest_ = std::move(parsed.manifest);
  } else {
    TC_ASSIGN_OR_RETURN(manifest_, ParseManifest(AsBytes(text)));
  }
  const ManifestFile* catalog = nullptr;
  for (const ManifestFile& file : manifest_->files) {
    TC_ASSIGN_OR_RETURN(File opened, OpenFile(file.name, false));
    if (file.role == FileRole::kCatalog) catalog = &file;
    if (file.role != FileRole::kData) continue;
    // The size agrees; the id tells a file of another save with that size.
    std::array<std::byte, kPeekBytes> first;
    const uint64_t peek = std::min<uint64_t>(kPeekBytes, file.bytes);
    TC_RETURN_IF_ERROR(
        opened.ReadExact(MutableByteSpan(first).first(peek), 0));
    if (PeekFileId(ByteSpan(first).first(peek)) != file.id) {
      return Corrupt("belongs to another save than the manifest")
          .WithFile(opened.path());
    }
  }
  if (!catalog) return Corrupt("the manifest names no catalog");
  TC_ASSIGN_OR_RETURN(const std::string bytes, ReadWhole(catalog->name));
  Result<Catalog> decoded = DecodeCatalog(AsBytes(bytes));
  if (!decoded.ok()) return decoded.status().WithFile(catalog->name);
  catalog_ = std::move(decoded).value();
  for (const CatalogFile& file : catalog_.files()) {
    const ManifestFile* listed = manifest_->Find(file.name);
    if (!listed || listed->id != file.id || listed->bytes != file.bytes) {
      return Corrupt("catalog and manifest disagree about " + file.name);
    }
  }
  return {};
}

Status Checkpoint::LoadForeign() {
  TC_ASSIGN_OR_RETURN(ScanResult scan, ScanDirectory(directory_));
  source_ = scan.by_index ? CheckpointSource::kIndex
                          : CheckpointSource::kHeaders;
  catalog_ = std::move(scan.catalog);
  return {};
}

Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
    const std::string& path) {
  Status last;
  std::string last_text;
  bool changed = false;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    if (attempt > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20 << attempt));
    }
    auto checkpoint = std::make_shared<Checkpoint>();
    Result<Directory> directory = Directory::Open(path);
    if (!directory.ok()) {
      if (directory.status().sys_errno() == ENOENT) {
        return Incomplete("there is no such directory").WithFile(path);
      }
      return directory.status();
    }
    checkpoint->directory_ = std::move(directory).value();
    const Directory& dir = checkpoint->directory_;
    // The journal first: while it stands it is the manifest.
    std::string text;
    bool journal = false;
    Result<Directory> staging = dir.OpenDirectory(std::string(kStageSuffix));
    if (staging.ok()) {
      Result<std::string> read =
          staging->ReadFile(std::string(kJournalName), kMaxManifestBytes);
      if (read.ok()) {
        text = std::move(read).value();
        journal = true;
        checkpoint->staging_ = std::move(staging).value();
      } else if (read.status().sys_errno() != ENOENT) {
        return read.status();
      }
    } else if (staging.status().sys_errno() != ENOENT) {
      return staging.status();
    }
    if (!journal) {
      Result<std::string> read =
          dir.ReadFile(std::string(kManifestName), kMaxManifestBytes);
      if (read.ok()) {
        text = std::move(read).value();
      } else if (read.status().sys_errno() != ENOENT) {
        return read.status();
      }
    }
    if (text.empty() && attempt == 0 && !journal) {
      Status status = checkpoint->LoadForeign();
      if (!status.ok()) return status;
      return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
    }
    Status status = checkpoint->LoadCommitted(text, journal);
    if (status.ok()) {
      return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
    }
    // A commit may have gone on between two looks: look again. Damage looks
    // the same every time.
    if (attempt > 0 && text != last_text) changed = true;
    if (attempt > 0 && text == last_text && !journal) break;
    last = std::move(status);
    last_text = std::move(text);
  }
  if (changed) {
    return Conflict("is being replaced by a save: " + last.ToString())
        .WithFile(path);
  }
  return std::move(last).WithFile(
      path + "/" + std::string(kManifestName));
}

}  // namespace torch_ckpt
