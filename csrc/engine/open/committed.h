// What says that a directory holds a checkpoint of ours, and which files it
// has.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// The journal of a save into a directory that is committed and, as far as can
// be seen, not carried out. No link is followed to it.
struct FoundJournal {
  Directory staging;  // where it lies, with the files that it renames
  std::string text;
};
// `place`: where saves stage inside the directory. nullopt where there is none.
Result<std::optional<FoundJournal>> FindJournal(const Directory& place);

// A journal while it stands, else the manifest, else the part manifests.
struct Committed {
  std::optional<std::string> text;  // nullopt: none of them
  bool journal = false;
  std::shared_ptr<const Directory> staging;  // of the journal
  std::vector<Manifest> parts;               // `text` is their save id
};
Result<Committed> ReadCommitted(const Directory& directory);

// kConflict when `id` is not the save that stands in the directory by now.
Status CheckSave(const Directory& directory, const std::string& id);

// The files that a manifest or a journal names, and where those are that the
// journal is still to rename, by their names in the directory.
struct CommittedFiles {
  Manifest manifest;
  std::shared_ptr<const Directory> staging;
  std::map<std::string, std::string> staged;
};
// kIncomplete for the journal of a removal. REQUIRES: a text and no parts.
Result<CommittedFiles> FilesOf(const Directory& directory,
                               const Committed& committed);

// The checkpoint that has files in a directory which is a subdirectory of its
// own.
struct CheckpointAbove {
  std::shared_ptr<const Directory> directory;  // the checkpoint's
  std::string name;                            // of the subdirectory there
  Committed committed;
};
// nullopt where there is none. An error where the manifest above cannot be
// read, which might name files here.
Result<std::optional<CheckpointAbove>> FindAbove(const Directory& directory);
// Whether the checkpoint in `directory`, if there is one, has files in a
// subdirectory `name`, or is about to remove some. Errors as FindAbove's.
Result<bool> HasFilesIn(const Directory& directory, const std::string& name);

}  // namespace torch_ckpt
