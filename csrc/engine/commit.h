// The commit: from staged files to a checkpoint that is there, whole.
//
//  1. Every staged file that the ranks named is opened: size, header and file
//     id must be what they said. The boxes of every tensor must tile it.
//  2. Catalog, index (where asked for) and manifest are written and synced.
//  3. Fresh target: files get their final names, staging is synced and renamed
//     onto T, the parent is synced: the commit point. Existing target: the
//     journal is the commit point, then it is replayed.
//
// Crash argument: before the commit point T is untouched; after it T (or the
// journal) names only synced files. Each fsync happens before the rename that
// makes its file count.
#pragma once

#include <string>
#include <vector>

#include "engine/staging.h"
#include "format/manifest.h"

namespace torch_ckpt {

struct CommitFile {
  std::string staged;
  ManifestFile file;  // final name, id, role, size and digests
};

struct ObjectEntry {
  std::string name;  // fqn
  std::string file;  // final name of the objects file that holds it
};

struct CommitRequest {
  int64_t world_size = 1;
  std::vector<CommitFile> files;
  std::vector<ObjectEntry> objects;
  // Names under which tensors are found as well, and those that they have.
  std::vector<std::pair<std::string, std::string>> aliases;
  // What must have been written, and of each the JSON text of its state-dict
  // path; empty where that is just [fqn].
  std::vector<std::pair<std::string, std::string>> planned;
  std::string index_name;  // of the index to write; empty: none
  // Files of the manifest that stands in T to keep and name again (KeptInPlace
  // of a merge). All others that it names go.
  std::vector<std::string> keep;
};

// Consumes the session on success. On failure the session still stands, and
// ending it cleans up; the old checkpoint of T is untouched unless the commit
// point was reached.
Result<Manifest> CommitSave(SaveSession* session, const CommitRequest& request);

// Replays an interrupted commit of `target` and removes what dead saves left.
// True when there was something to do.
Result<bool> RecoverDirectory(const std::string& target);

}  // namespace torch_ckpt
