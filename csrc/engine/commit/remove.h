// Removing a checkpoint.
//
//  1. A commit that was interrupted is carried out, and the lock of a save is
//     taken.
//  2. The files that the manifest names are unlinked, and those of parts that
//     stand beside it or instead of it, which would be a checkpoint without it;
//     with the subdirectories that this leaves empty. All that is synced.
//  3. The manifests of parts are unlinked, then the manifest, and the directory
//     is synced.
//  4. The lock goes, and then the directory, if nothing of others is in it.
//
// Crash argument: until step 3 there is a manifest, by which what is left is
// incomplete, for every reader, and can be removed again. Without one the rest
// of the files would be taken for a whole checkpoint of somebody else's.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

struct RemovedCheckpoint {
  std::vector<std::string> removed;  // files that were there, manifests last
  std::vector<std::string> left;     // what is in the directory still
  bool directory = false;            // whether that was empty and is gone too
};

// Steps 1 to 4, of a damaged checkpoint too. No link is followed: one that has
// a file's name goes itself. A directory that has one stays, with what is in
// it. kInvalidArgument where `path` itself is a link; kIncomplete, and no more
// is done than the first half of step 1, where there is no manifest; kConflict
// while a save is in progress, or has gone ahead of this on a file system that
// keeps locks to each node.
Result<RemovedCheckpoint> RemoveCheckpoint(const std::string& path);

}  // namespace torch_ckpt
