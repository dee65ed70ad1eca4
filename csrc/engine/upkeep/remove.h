// Removing a checkpoint.
//
//  1. A save begins, which carries out a commit that was interrupted.
//  2. It commits nothing: a journal (engine/commit/journal.h) of no files, by
//     which all goes that the manifests name, and they themselves, the manifest
//     of the whole last; with the subdirectories that this leaves empty.
//  3. The lock goes, and then the directory, if nothing of others is in it.
//
// Crash argument: that of any commit. Before it the checkpoint is whole; after
// it readers are told by the journal that it is being removed, and the next
// removal, save or `recover` goes on. Nowhere in between would anybody take
// what is left for a checkpoint, a whole one of somebody else's least of all.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

struct RemovedCheckpoint {
  // Files that were there, manifests last; those that the journal of a removal
  // names which was interrupted, where this one goes on with it.
  std::vector<std::string> removed;
  std::vector<std::string> left;      // what is in the directory still
  bool directory = false;             // whether that was empty and is gone too
  std::vector<std::string> warnings;  // as SaveSession::TakeWarnings
};

// Steps 1 to 3, of a damaged checkpoint too; where a manifest is damaged, of
// what is called as only files of our saves are. No link is followed: one that
// has a file's name goes itself. A directory that has one stays, with what is
// in it. kInvalidArgument where `path` itself is a link; kIncomplete, and
// nothing is done, where there is no manifest; kConflict while a save is in
// progress, or has gone ahead of this on a file system that keeps locks to each
// node.
Result<RemovedCheckpoint> RemoveCheckpoint(const std::string& path);

}  // namespace torch_ckpt
