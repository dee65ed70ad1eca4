#include "engine/open/file_set.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "format/safetensors/sharding_info.h"
#include "os/patience.h"
#include "os/probe.h"
#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

constexpr int kCheckThreads = 4;
constexpr uint64_t kPeekBytes = 4096;

// The size agrees; the id tells a file of another save with that size.
Status CheckFileId(const File& file, uint64_t bytes, const std::string& id) {
  std::array<std::byte, kPeekBytes> first;
  const uint64_t peek = std::min<uint64_t>(kPeekBytes, bytes);
  TC_RETURN_IF_ERROR(file.ReadExact(MutableByteSpan(first).first(peek), 0));
  if (PeekFileId(ByteSpan(first).first(peek)) == id) return {};
  return Corrupt("belongs to another save").WithFile(file.path());
}

// Whether this may come of another save that has replaced the files, or of a
// cache that still shows what was there before it. ESTALE: a file was removed
// on the server while it was open here.
bool MayBeReplaced(const Status& status) {
  return status.kind() == ErrorKind::kCorrupt ||
         status.kind() == ErrorKind::kIncomplete ||
         status.sys_errno() == ESTALE;
}

}  // namespace

FileSet::FileSet(FileList list)
    : list_(std::move(list)), by_name_(list_.files) {}

Status FileSet::CheckCurrent() const {
  return list_.check_current ? list_.check_current() : Status();
}

Status FileSet::UntilSure(const std::function<Status()>& step) const {
  Status status = step();
  if (!MayBeReplaced(status)) return status;
  // Once for all: who has waited knows what this node sees.
  const bool late = !believes_ && IsShared(*list_.directory);
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

Status FileSet::Explain(const Status& status) const {
  return UntilSure([&] { return status; });
}

Result<File> FileSet::OpenFile(uint32_t file, const FileInfo* known) const {
  File opened;
  TC_RETURN_IF_ERROR(UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(opened, LookForFile(files()[file], known));
    return {};
  }));
  return opened;
}

Result<File> FileSet::LookForFile(const ManifestFile& listed,
                                  const FileInfo* known) const {
  // A replay renames from staging to the target: look there first, so that a
  // rename between the two looks cannot hide the file.
  const auto staged = list_.staged.find(listed.name);
  for (int place = 0; place < 2; ++place) {
    if (place == 0 && staged == list_.staged.end()) continue;
    const Directory& where = place == 0 ? *list_.staging : *list_.directory;
    const std::string& as = place == 0 ? staged->second : listed.name;
    // What is staged is never a link; a directory may be somebody else's work.
    Result<File> file = where.OpenFile(as, {.no_follow = place == 0});
    if (!file.ok()) {
      const int error = file.status().sys_errno();
      // Staging goes when its commit is through.
      if (error == ENOENT || (place == 0 && error == ESTALE)) continue;
      if (place == 0 && error == ELOOP) {
        return Corrupt("is a symbolic link").WithFile(where.Join(as));
      }
      return file.status();
    }
    TC_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
    if (info.bytes != listed.bytes) {
      return Corrupt("has " + std::to_string(info.bytes) + " bytes, " +
                     (has_digests() ? "was written with "
                                    : "had others when it was looked at: ") +
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
  return Incomplete("is missing").WithFile(list_.directory->Join(listed.name));
}

Status FileSet::CheckUnchanged(const std::vector<uint32_t>& files) const {
  if (list_.seen.empty()) return {};
  // Network file systems answer an open from the server, and stat from what
  // they remember.
  const Directory& directory = *list_.directory;
  const bool shared = IsShared(directory);
  const auto look =
      [&](const std::string& name) -> Result<std::optional<FileInfo>> {
    if (!shared) return directory.StatName(name);
    TC_ASSIGN_OR_RETURN(const File file, directory.OpenFile(name, {}));
    TC_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
    return std::optional<FileInfo>(info);
  };
  for (const uint32_t file : files) {
    const std::string& name = list_.files[file].name;
    const FileInfo& seen = list_.seen[file];
    const auto now = look(name);
    const int error = now.status().sys_errno();
    if (!now.ok() && error != ENOENT && error != ESTALE) return now.status();
    // A file that took its place within a tick of the clock has its time. Not
    // all network file systems give a file the same number each time.
    if (now.ok() && *now && (*now)->bytes == seen.bytes &&
        (*now)->modified_ns == seen.modified_ns &&
        (shared || (*now)->SameFile(seen))) {
      continue;
    }
    return Conflict("was written or removed since the checkpoint was opened")
        .WithFile(directory.Join(name));
  }
  return {};
}

Status FileSet::CheckFiles() const {
  // Each was looked at when the checkpoint was opened.
  if (!list_.seen.empty()) return {};
  return ForEachItem(kCheckThreads, static_cast<int64_t>(files().size()),
                     nullptr, [&](int64_t file, int) -> Status {
                       return OpenFile(static_cast<uint32_t>(file)).status();
                     });
}

Result<std::string> FileSet::ReadWhole(uint32_t file) const {
  const ManifestFile& listed = files()[file];
  std::string text(listed.bytes, '\0');
  TC_RETURN_IF_ERROR(UntilSure([&]() -> Status {
    TC_ASSIGN_OR_RETURN(const File in, LookForFile(listed, nullptr));
    TC_RETURN_IF_ERROR(in.ReadExact(
        {reinterpret_cast<std::byte*>(text.data()), text.size()}, 0));
    return CheckSegments(listed, 0, AsBytes(text)).WithFile(listed.name);
  }));
  return text;
}

}  // namespace torch_ckpt
