// A save without collectives: every rank commits a part of its own, and the
// directory is a checkpoint once the parts of all ranks stand in it. For fresh
// directories only, since nobody could replace the files of all ranks at once.
//
//  0. Rank r refuses a T that holds anything but parts of this very save (run
//     id, sequence, world size) or a file that is named as its own are. It
//     makes and locks T/.torch_ckpt-stage-{r+1:05}. While that directory is
//     there, all in T that is named as files of rank r are is of this part.
//  1. It writes its files there, as in any save.
//  2. CommitPart proves them as CommitSave does, but for the tiling: the other
//     ranks hold the rest. Readers prove that (engine/open/rank_manifests.h).
//  3. T and its name are synced, the files renamed into T, both synced.
//  4. The part manifest, written and synced in staging, is renamed to
//     T/torch_ckpt-{r+1:05}-of-{n:05}.json and both are synced: the commit
//     point of this rank.
//  5. Staging is removed.
//
// Crash argument: a part whose manifest is not in T is not committed, and its
// staging directory is there, so that whoever comes next finds its files by
// their names and unlinks them. Nothing in T is ever renamed over. Readers
// refuse T as long as a part manifest is missing, and a T without any while it
// holds the staging directory of a part; they read what manifests name only.
#pragma once

#include <string>

#include "engine/commit/commit.h"
#include "format/ours/manifest.h"
#include "os/directory.h"
#include "os/lock.h"

namespace torch_ckpt {

// One rank's save in progress. Destroying it without a commit undoes it.
// Movable. Not for use from two threads at once.
class PartSession {
 public:
  PartSession(PartSession&&) = default;
  PartSession& operator=(PartSession&&) = default;
  ~PartSession();

  const std::string& target() const { return target_; }
  const std::string& path() const { return path_; }  // of staging
  const Directory& directory() const { return lock_.directory(); }
  const ManifestPart& part() const { return part_; }
  const std::string& save_id() const { return save_id_; }

 private:
  friend Result<PartSession> BeginPart(const std::string& target,
                                       const ManifestPart& part);
  friend Result<Manifest> CommitPart(PartSession* session,
                                     const CommitRequest& request);
  PartSession() = default;
  // One try, at an absolute path.
  static Result<PartSession> Begin(const std::string& target,
                                   const ManifestPart& part);

  std::string target_, path_;
  DirectoryLock lock_;
  ManifestPart part_;
  std::string save_id_;
};

// Creates `target` and its parents where they are missing, and removes what a
// dead save of this rank left; rank 0 also what ranks beyond this world left.
// kConflict when the directory is not fresh, or when another save of this rank
// is in progress; kInvalidArgument for a rank outside its world.
Result<PartSession> BeginPart(const std::string& target,
                              const ManifestPart& part);

// Consumes the session on success. After a failure ending it cleans up: nothing
// of this rank is left in T unless the commit point was reached. Every file is
// named after the rank; world_size and index_name of the request do not count.
Result<Manifest> CommitPart(PartSession* session, const CommitRequest& request);

// Removes what dead part saves of the ranks from `first` on left in `target`.
// True when there was something; kConflict while one of them is alive.
Result<bool> RemoveDeadParts(const Directory& target, int64_t first = 0);

}  // namespace torch_ckpt
