// The staging directory of a save, and who may use it.
//
//   target T absent:
//       parent/.<name>.torch_ckpt-stage, renamed to T by the commit
//   otherwise:
//       T/.torch_ckpt-stage, whose files the commit moves into T
//
// The name is a function of T, so that every rank finds it, and a save that
// died is found and removed by the next one. The coordinator holds the lock on
// the directory from BeginSave until the commit or the end of the session.
#pragma once

#include <string>

#include "os/directory.h"
#include "os/lock.h"

namespace torch_ckpt {

struct StagingPlace {
  std::string target;  // absolute
  std::string path;    // absolute
  bool fresh = false;  // the commit renames the directory itself
};

// The name of the staging directory beside T. A name that would be too long
// for a file has T's name as a number in it.
std::string SiblingStageName(const std::string& target);

// Where a save into `target` stages, as things stand now.
Result<StagingPlace> LocateStaging(const std::string& target);

// A save in progress; coordinator only. Destroying it without a commit removes
// the staging directory. Movable. Not for use from two threads at once.
class SaveSession {
 public:
  SaveSession(SaveSession&&) = default;
  SaveSession& operator=(SaveSession&&) = default;
  ~SaveSession();

  const StagingPlace& place() const { return place_; }
  const Directory& directory() const { return lock_.directory(); }
  const std::string& save_id() const { return save_id_; }
  // The commit is through: nothing is left to clean.
  void Finish();
  // Removes the staging directory and what is in it. The lock goes last, so
  // that nothing of a save that takes it next is touched.
  Status RemoveStaging();
  // Moves a fresh staging directory into the target, which was made by others
  // since. kConflict when a save inside the target is in progress, or when it
  // holds a checkpoint that is not to be overwritten.
  Status MoveInside();

 private:
  friend Result<SaveSession> BeginSave(const std::string& target,
                                       bool overwrite);
  SaveSession() = default;
  StagingPlace place_;
  DirectoryLock lock_;
  std::string save_id_;
  bool overwrite_ = true;
};

// Locks the staging directory, replays a commit that was interrupted after its
// commit point, removes what a dead save left, and writes the save id for the
// other ranks. Creates missing parents of `target`. kUnsupported on a file
// system that cannot write out of order or rename. kConflict when another
// save holds the lock, or when overwrite is false and T holds a checkpoint.
Result<SaveSession> BeginSave(const std::string& target, bool overwrite);

// For every other rank: the staging directory that the coordinator has made
// and the id of its save. kIncomplete, saying that the path is not shared,
// when it cannot be seen from here.
struct JoinedSave {
  std::string staging;
  std::string save_id;
};
Result<JoinedSave> JoinSave(const std::string& target);

// Removes every entry of `directory` but `keep` (one level of subdirectories
// deep). Links are removed, never followed.
Status EmptyDirectory(const Directory& directory, std::string_view keep = {});

// kCorrupt when the path is a symbolic link: what is in a staging directory is
// deleted, so it must be where it seems to be.
Status RefuseLink(const std::string& path);

inline constexpr std::string_view kSaveIdName = "save_id";

}  // namespace torch_ckpt
