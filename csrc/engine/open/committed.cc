#include "engine/open/committed.h"

#include <cerrno>
#include <set>
#include <utility>

#include "engine/open/rank_manifests.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

// Journal or manifest.
Result<Committed> ReadWholeSave(const Directory& directory) {
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
    out.staging =
        std::make_shared<const Directory>(std::move((*journal)->staging));
    return out;
  }
  Result<std::string> read =
      directory.ReadFile(std::string(kManifestName), kMaxManifestBytes);
  if (read.ok()) {
    out.text = std::move(read).value();
  } else if (read.status().sys_errno() != ENOENT) {
    return read.status();
  }
  return out;
}

Result<Journal> JournalOf(const Committed& committed) {
  Result<Journal> journal = ParseJournal(AsBytes(*committed.text));
  if (journal.ok()) return journal;
  return journal.status().WithFile(
      committed.staging->Join(std::string(kJournalName)));
}

Result<Manifest> ManifestOf(const Committed& committed) {
  if (committed.journal) {
    TC_ASSIGN_OR_RETURN(Journal journal, JournalOf(committed));
    return std::move(journal.manifest);
  }
  return ParseManifest(AsBytes(*committed.text));
}

Result<std::string> SaveIdOf(const Committed& committed) {
  if (!committed.text) return std::string();
  if (!committed.parts.empty()) return *committed.text;
  TC_ASSIGN_OR_RETURN(Manifest manifest, ManifestOf(committed));
  return std::move(manifest.save_id);
}

// The directories in the checkpoint's own that its tensors and objects lie in,
// or that a journal takes files out of.
Result<std::set<std::string>> SubdirectoriesOf(const Committed& committed) {
  std::set<std::string> names;
  const auto add = [&](const std::string& path) {
    const size_t slash = path.find('/');
    if (slash != path.npos) names.insert(path.substr(0, slash));
  };
  const auto add_files = [&](const Manifest& manifest) {
    for (const ManifestFile& file : manifest.files) {
      if (file.role == FileRole::kData || file.role == FileRole::kObjects) {
        add(file.name);
      }
    }
  };
  if (committed.journal) {
    TC_ASSIGN_OR_RETURN(const Journal journal, JournalOf(committed));
    add_files(journal.manifest);
    for (const std::string& path : journal.removes) add(path);
    return names;
  }
  TC_ASSIGN_OR_RETURN(const Manifest manifest, ManifestOf(committed));
  add_files(manifest);
  return names;
}

// The same of what is committed in `directory`.
Result<std::set<std::string>> SubdirectoriesIn(const Directory& directory,
                                               const Committed& committed) {
  if (!committed.text) return std::set<std::string>();
  Result<std::set<std::string>> names = SubdirectoriesOf(committed);
  if (names.ok()) return names;
  return names.status().WithFile(directory.Join(std::string(kManifestName)));
}

}  // namespace

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

Result<Committed> ReadCommitted(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(Committed out, ReadWholeSave(directory));
  if (out.text) return out;
  TC_ASSIGN_OR_RETURN(out.parts, ReadParts(directory));
  if (!out.parts.empty()) out.text = PartsSaveId(out.parts);
  return out;
}

Status CheckSave(const Directory& directory, const std::string& id) {
  TC_ASSIGN_OR_RETURN(const Committed now, ReadCommitted(directory));
  TC_ASSIGN_OR_RETURN(const std::string current, SaveIdOf(now));
  if (current == id) return {};
  return Conflict("is being replaced by a save").WithFile(directory.path());
}

Result<CommittedFiles> FilesOf(const Directory& directory,
                               const Committed& committed) {
  CommittedFiles out;
  if (!committed.journal) {
    TC_ASSIGN_OR_RETURN(out.manifest, ManifestOf(committed));
    if (!out.manifest.part) return out;
    return Corrupt("is the manifest of one rank's part");
  }
  TC_ASSIGN_OR_RETURN(Journal journal, JournalOf(committed));
  if (journal.IsRemoval()) {
    return Incomplete(
               "is being removed, or the removal was interrupted: remove it "
               "again, or recover it, to carry that out")
        .WithFile(directory.path());
  }
  out.manifest = std::move(journal.manifest);
  out.staging = committed.staging;
  for (JournalRename& rename : journal.renames) {
    out.staged[std::move(rename.to)] = std::move(rename.from);
  }
  return out;
}

Result<std::optional<CheckpointAbove>> FindAbove(const Directory& directory) {
  // Not by its path, which may lead here through a link.
  Result<Directory> opened = Directory::Open(directory.Join(".."));
  const int error = opened.status().sys_errno();
  if (error == EACCES || error == ENOENT) {
    return std::optional<CheckpointAbove>();
  }
  TC_RETURN_IF_ERROR(opened.status());
  CheckpointAbove above;
  above.directory =
      std::make_shared<const Directory>(std::move(opened).value());
  TC_ASSIGN_OR_RETURN(above.committed, ReadWholeSave(*above.directory));
  TC_ASSIGN_OR_RETURN(const std::set<std::string> names,
                      SubdirectoriesIn(*above.directory, above.committed));
  TC_ASSIGN_OR_RETURN(const FileInfo here, directory.Stat());
  for (const std::string& name : names) {
    TC_ASSIGN_OR_RETURN(const auto there, above.directory->StatEntry(name));
    if (!there || !there->SameFile(here)) continue;
    above.name = name;
    return std::optional(std::move(above));
  }
  return std::optional<CheckpointAbove>();
}

Result<bool> HasFilesIn(const Directory& directory, const std::string& name) {
  TC_ASSIGN_OR_RETURN(const Committed committed, ReadWholeSave(directory));
  TC_ASSIGN_OR_RETURN(const std::set<std::string> names,
                      SubdirectoriesIn(directory, committed));
  return names.contains(name);
}

}  // namespace torch_ckpt
