// The states that a crash of the machine at any moment of a save may leave on
// disk.
//
// A save is recorded: after each system call the tree is compared with what it
// was before, which gives the operations that took effect. For every prefix of
// them the states are built that a crash could leave, under this model:
//
//  1. Names. An operation on names (create, unlink, mkdir, rmdir, rename) is
//     durable once every directory whose entries it changed was synced after
//     it. Until then it may be lost or kept, whatever becomes of others: names
//     of one directory may persist out of order. A single operation is never
//     half done: rename is atomic, also between two directories.
//  2. Data. Bytes of a file are durable once the file was synced after they
//     were written. Until then a file that has a name may hold what was last
//     synced (nothing, for a new one), what was written, zeros of its length,
//     or any mixture by blocks of 4 KiB; syncing a file says nothing about its
//     name, and the other way round.
//  3. What was there before the save began is durable. A save that is killed
//     and one that follows are one recording: what the first one left in
//     memory the second one finds, but a crash need not.
//
// This is weaker than ext4, XFS and Btrfs promise (they commit names in order),
// so what holds here holds there. Small sets of undecided operations are tried
// exhaustively, larger ones by all single and prefix choices and a sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "os/fault.h"

namespace torch_ckpt::crash {

using Id = int;  // of a file or directory, whatever its names are
using Name = std::pair<Id, std::string>;
using Tree = std::map<Name, Id>;

inline constexpr Id kRoot = 0;

// What one system call did.
struct Op {
  enum Kind { kNames, kData, kSyncFile, kSyncDirectory };
  Kind kind = kNames;
  std::vector<std::pair<Name, Id>> removed, added;  // kNames
  Id id = kRoot;                                    // the others
  std::string content;                              // kData: of the whole file
};

// Watches the tree under `root` through the fault hook, until Stop.
class Recorder {
 public:
  explicit Recorder(std::string root);
  void Stop();
  // From the first call of which `last` says so on no call takes effect, as
  // when the process is killed, until Revive: what is done then is another
  // process's, and what the first one did not sync is not durable.
  void KillAt(std::function<bool(const FaultSite&)> last);
  bool Revive();  // whether it was killed

  const std::vector<Op>& ops() const { return ops_; }
  const Tree& first_tree() const { return first_tree_; }
  const std::map<Id, std::string>& first_contents() const {
    return first_contents_;
  }
  bool IsDirectory(Id id) const { return directories_.contains(id); }

 private:
  // A directory that was renamed goes on being called by its old path.
  Id Resolve(const std::string& path);

  // Takes down what changed since the last look.
  void Settle();
  void Look(Tree* tree, std::map<Id, std::string>* contents);
  void Visit(const std::string& path, Id directory, Tree* tree,
             std::map<Id, std::string>* contents, std::map<uint64_t, Id>* seen);

  const std::string root_;
  std::mutex mutex_;
  std::function<bool(const FaultSite&)> kill_at_;
  bool killed_ = false;
  std::vector<Op> ops_;
  Tree tree_, first_tree_;
  std::map<Id, std::string> contents_, first_contents_;
  std::map<std::string, Id> by_path_;  // last seen there
  std::map<uint64_t, Id> ids_;         // by inode
  std::set<Id> directories_;
  Id next_ = kRoot + 1, syncing_ = -1;
};

// The states that a crash after the first `prefix` operations may leave.
class CrashStates {
 public:
  // `recorder` must outlive this.
  CrashStates(const Recorder& recorder, size_t prefix);

  // Writes each state under a new `path` and calls `check`, unless an equal
  // one was in `done`.
  void ForEach(const std::string& path, std::set<std::string>* done,
               const std::function<void(const std::string&)>& check);

 private:
  bool Durable(size_t i) const;

  // Sets of operations that are lost.
  std::vector<std::set<size_t>> Choices(std::mt19937* random) const;

  Tree Names(const std::set<size_t>& lost) const;
  // Relative paths, with contents; those of directories end in '/'.
  void Collect(const Tree& tree, Id directory, const std::string& prefix,
               int variant, std::mt19937* random,
               std::map<std::string, std::string>* files,
               bool* undecided) const;

  std::string Content(Id id, int variant, std::mt19937* random,
                      bool* undecided) const;

  static void Materialise(const std::string& path,
                          const std::map<std::string, std::string>& files);

  const Recorder& recorder_;
  const size_t prefix_;
  std::vector<size_t> open_;  // operations that may be lost
  std::map<Id, std::string> synced_, latest_;
};

}  // namespace torch_ckpt::crash
