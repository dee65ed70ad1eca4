// The commit: from staged files to a checkpoint that is there, whole.
//
//  1. Every staged file that the ranks named is opened: size, header and file
//     id must be what they said. The boxes of every tensor must tile it.
//  2. Catalog, index (where asked for) and manifest are written and synced.
//  3. Fresh target: files get their final names and staging is synced. If the
//     session is still the one that may commit (engine/commit/staging.h),
//     staging is renamed to T, and its old and new parents are synced: the
//     commit point.
//  4. Existing target: every name in T that the commit would replace or remove
//     is looked at, since after the commit point it would be too late to find
//     that one cannot be. If all staged files are there, staging is renamed
//     with its journal (engine/commit/journal.h), which is the commit point,
//     and the journal carried out.
//  5. What is left of staging is removed. Nothing after the replay makes an
//     error of a save that is committed: what cannot go now goes with the next.
//
// Crash argument: before the commit point T is untouched; after it T (or the
// journal) names only synced files. Each fsync happens before the rename that
// makes its file count, and one that fails fails the save.
#pragma once

#include <string>
#include <vector>

#include "engine/commit/staging.h"
#include "engine/write/staged_file.h"
#include "format/ours/manifest.h"

namespace torch_ckpt {

struct ObjectEntry {
  std::string name;  // fqn
  std::string file;  // final name of the objects file that holds it
};

struct CommitRequest {
  int64_t world_size = 1;
  std::vector<StagedFile> files;
  std::vector<ObjectEntry> objects;
  // Names under which tensors are found as well, and those that they have.
  std::vector<std::pair<std::string, std::string>> aliases;
  // What must have been written, and of each the JSON text of its state-dict
  // path; empty where that is just [fqn].
  std::vector<std::pair<std::string, std::string>> planned;
  std::string index_name;  // of the index to write; empty: none
  std::vector<std::pair<std::string, std::string>> metadata;  // Manifest's
  // Files of the manifest that stands in T to keep and name again (of a
  // merge). All others that it names go.
  std::vector<std::string> keep;
};

// Consumes the session on success. On failure the session still stands, and
// ending it cleans up; the old checkpoint of T is untouched unless the commit
// point was reached. kConflict when another save has superseded this one or has
// committed since it began, or when something in T cannot be replaced.
Result<Manifest> CommitSave(SaveSession* session, const CommitRequest& request);

// A place where a save into a target stages, or has staged.
struct StagedPlace {
  std::string path;
  bool in_use = false;     // by a save that is going on, as far as locks tell
  bool committed = false;  // it holds a journal that is to be replayed
};

// All that there are of `target`, those of ranks without collectives as well.
// Writes and locks nothing. `target` itself need not be there.
Result<std::vector<StagedPlace>> StagedPlaces(const std::string& target);

// Replays an interrupted commit of `target` and removes what dead saves left.
// True when there was something to do.
Result<bool> RecoverDirectory(const std::string& target);

}  // namespace torch_ckpt
