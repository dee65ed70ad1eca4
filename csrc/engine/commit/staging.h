// The staging directory of a save, and who may use it.
//
// The place is a function of the target T, so that every rank finds it and a
// save that died is found by the next one:
//
//   T absent:    parent/.<name>.torch_ckpt-stage
//   otherwise:   T/.torch_ckpt-stage
//
// What others read alone (foreign_target.h) is always staged beside T.
//
//   <place>/.lock            the lock of its coordinator (os/lock.h)
//   <place>/save_id          the id of the save that is going on
//   <place>/<save id>/       what its ranks write; the commit renames this
//                            directory: to T if T is absent, else
//   <place>/committed/       to this; it has the journal (journal.h)
//   <place>/dead-<save id>/  of a save that was superseded; to be removed
//
// The coordinator, from BeginSave to the commit or the end of the session:
//
//  1. makes the place and takes its lock; the loser of a race is told here,
//     where locks tell the truth;
//  2. carries out a commit that was interrupted (journal.h);
//  3. supersedes every other save whose directory is there: renames <id>/ to
//     dead-<id>/, and removes it. If <id>/ is not there any more, that save may
//     have committed: 2 and 3 again;
//  4. makes a directory of its own, and names it in save_id, by a rename;
//  5. before its commit point it looks whether save_id and the name of its
//     directory are what they were, and whether T has the manifest that it had
//     at the begin. If not: kConflict, and nothing is harmed.
//
// Two nodes whose file system keeps locks to each node: both get past step 1.
// Nobody has to prove the other one dead, because a superseded save cannot
// commit: superseding (3) and committing are each one rename of one name,
// <place>/<id>, of which the server does one first. So the later of the two
// wins. The earlier one finds out at its commit; or it has committed already,
// which the later one finds in step 3, or in step 5 (T is another one) if both
// made their directories after both had looked: then save_id names one of them.
// A name is only ever renamed to one that nothing has: of directories no system
// replaces one that has anything in it. What a node finds that stood still
// while others went on is told in journal.h.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit/previous.h"
#include "os/directory.h"
#include "os/lock.h"
#include "os/patience.h"

namespace torch_ckpt {

struct StagingPlace {
  std::string target;  // absolute
  std::string root;    // absolute: the place
  std::string path;    // of this save's directory in it
  bool fresh = false;  // the commit renames the directory itself
};

// kConflict where `target`, absolute, is a subdirectory of a checkpoint that
// has files in it: what is saved there would take their place.
Status RefusePart(const std::string& target);

// The two places of an absolute T. A name beside T that would be too long for a
// file has T's name as a number in it.
std::string PlaceBeside(const std::string& target);
std::string PlaceInside(const std::string& target);

// A save in progress; coordinator only. Destroying it without a commit removes
// what it has staged. Movable. Not for use from two threads at once.
class SaveSession {
 public:
  SaveSession(SaveSession&&) = default;
  SaveSession& operator=(SaveSession&&) = default;
  ~SaveSession();

  const StagingPlace& place() const { return place_; }
  const Directory& root() const { return lock_.directory(); }
  const Directory& directory() const { return staging_; }
  const std::string& save_id() const { return save_id_; }
  // Step 5: kConflict when another save has superseded this one, or has
  // committed into T since the begin.
  Status CheckStillOurs() const;
  // What the user should hear of what was found and given up, each once:
  // whoever holds the session hands it over after the begin, and again after
  // the commit.
  std::vector<std::string> TakeWarnings() {
    return std::exchange(warnings_, {});
  }
  // That of previous.h, before the save writes anything; what is there by then
  // is looked at again by the commit. Where T was not there, nothing hides.
  Status CheckNotHidden(const NewFiles& files) const;
  // Of a save that is to be committed inside T: what the manifest of T is.
  Status CheckTarget(const Directory& target) const;
  // What the commit is to remove, so that T does not hold two checkpoints: the
  // names of FindStockMetadata. kConflict for such a name where those of others
  // are not to be replaced.
  Result<std::vector<std::string>> ReplacedOfOthers(
      const Directory& target) const;
  // The commit is through, or the session gives up: removes what is left of
  // staging and releases the lock. Best effort: what does not go now is
  // removed by the next save.
  void End();
  // Moves a fresh session's directory into the target, which was made by
  // others since. kConflict when a save inside the target is in progress, or
  // when it holds a checkpoint of ours by now, or any that is not to be
  // overwritten.
  Status MoveInside();

 private:
  friend Result<SaveSession> BeginSave(const std::string& target,
                                       bool overwrite, bool others,
                                       bool beside);
  SaveSession() = default;
  // One try. ENOENT or ESTALE when something changed meanwhile.
  static Result<SaveSession> Begin(const std::string& target, bool overwrite,
                                   bool others, bool beside);
  // Steps 1 to 3 at place_, whose lock is lock_ then.
  Status Enter();
  Status NameInPlace() const;  // step 4
  Result<bool> IsStillOurs() const;
  StagingPlace place_;
  DirectoryLock lock_;
  Directory staging_;
  std::string save_id_;
  bool overwrite_ = true;
  bool others_ = false;
  std::optional<FileInfo> manifest_;          // of T, at the begin
  std::optional<Result<Previous>> previous_;  // the same
  std::vector<std::string> warnings_;
};

// How long the begin of a save is tried again: the place may go with the save
// that held it, and a commit may make T, between a look and a lock; another
// node may see either late.
class PlacePatience {
 public:
  // The place lies in `parent`, which is looked at when there is need.
  explicit PlacePatience(std::string parent) : parent_(std::move(parent)) {}
  // As Patience::Wait.
  bool Wait();
  // Whether this is what a place says that has gone.
  static bool Changed(const Status& status);

 private:
  std::string parent_;
  std::optional<Patience> patience_;
};

// Steps 1 to 4. Creates missing parents of `target`. kUnsupported on a file
// system that cannot write out of order or rename. kConflict when another save
// holds the lock, when overwrite is false and T holds a checkpoint, or when
// T holds one of stock DCP and `others` is false. Where
// the place changes under its hands it begins again, for kPatience; on a shared
// file system, where another node may have removed it, for kNamePatience.
// `beside`: stages beside T whatever stands there, and does not look at it.
Result<SaveSession> BeginSave(const std::string& target, bool overwrite,
                              bool others = false, bool beside = false);

// What a save is told that did not find what it had staged, or where it stages,
// at `path`: kConflict where that is not there any more, since another save has
// superseded it. Any other error as it is.
Status ExplainGone(Status status, const std::string& path);

// For every other rank: the directory that the coordinator has made and the id
// of its save. Looks again for `total`, since the caches of a network file
// system may hide it for a while; then kIncomplete, saying that the path is
// not shared.
struct JoinedSave {
  std::string staging;
  std::string save_id;
};
Result<JoinedSave> JoinSave(const std::string& target,
                            std::chrono::milliseconds total = kPatience);

// Steps 2 and 3 for a place inside `target`, whose lock the caller holds.
// `given_up` is CarryOutFound's.
Status CarryOutAndSweep(const Directory& root, const Directory& target,
                        Status* given_up = nullptr);

// Step 3 for all that stands at a place, whose lock the caller holds. Files
// that nobody knows go too. What a network file system keeps for a process that
// has it open (.nfs*) stays for a later save. False where a save did not have
// its name any more.
Result<bool> SweepPlace(const Directory& root);

// What a directory at a place is called that only waits to be removed.
std::string DeadName(const std::string& id);

// Removes every entry of `directory` but `keep`, with what is in it.
Status EmptyDirectory(const Directory& directory, std::string_view keep);

// kCorrupt when the path is a symbolic link: what is in a staging directory is
// deleted, so it must be where it seems to be.
Status RefuseLink(const std::string& path);

inline constexpr std::string_view kSaveIdName = "save_id";

}  // namespace torch_ckpt
