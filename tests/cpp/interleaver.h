// Runs several actors over one real directory, one at a time and in an order
// that a test says: an actor is stopped before any system call of its own that
// has to do with names, and others go on.
//
// Real threads, and the real file system behind os/ (in memory, where there is
// one), with the fault hook as the scheduler: so it is the kernel that says
// what a rename over a directory does, or one into a directory that is gone,
// and not a model of it that was written by who wrote the protocol.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "os/fault.h"

namespace torch_ckpt {

// What the file system is like for all actors.
struct World {
  bool locks = true;         // false: kept to each node, and each is a node
  bool rename_flags = true;  // RENAME_NOREPLACE
  int full_after = -1;       // no space after so many calls of all; -1: never
};

// An actor goes on for so many calls, or up to the next one whose line in the
// trace has `before` in it, or to its end if there are no more of them. Then it
// may die: no call of its has an effect any more.
struct Turn {
  static constexpr int kToTheEnd = 1 << 30;
  int actor = 0;
  int calls = kToTheEnd;
  bool dies = false;
  std::string before = {};  // empty: no call
};

class Interleaver {
 public:
  // Counts calls on paths below `root`: those that change names, list them or
  // look at a name on which a decision hangs; with `fine` all that look.
  Interleaver(std::string root, bool fine)
      : root_(std::move(root)), fine_(fine) {}

  // The turns in order, then all that have not ended, one after the other. An
  // actor that waits for the others lets them run.
  void Run(const World& world, const std::vector<Turn>& turns,
           std::vector<std::function<void()>> actors);

  // Of the last run. Counted calls of an actor; whether it died; what all did.
  int calls(int actor) const { return actors_[Index(actor)]->calls; }
  bool died(int actor) const { return actors_[Index(actor)]->dead; }
  const std::string& trace() const { return trace_; }
  // The calls at which a turn was to stop and that its actor did not make.
  const std::string& missed() const { return missed_; }

 private:
  struct Actor {
    std::binary_semaphore go{0};
    int calls = 0, left = 0;
    std::string before;  // of its turn; empty once it has stopped there
    bool dead = false, ended = false, waits = false;
    std::thread thread;
  };
  static size_t Index(int actor) { return static_cast<size_t>(actor); }

  FaultAction Visit(const FaultSite& site);
  bool Counts(const FaultSite& site) const;
  // A counted call, in words.
  std::string Line(const FaultSite& site) const;
  // Whether its turn ends before this call.
  bool EndsTurn(const FaultSite& site, Actor* self) const;
  // Lets it run until it gives up its turn.
  void Let(const Turn& turn);

  const std::string root_;
  const bool fine_;
  World world_;
  std::vector<std::unique_ptr<Actor>> actors_;
  std::binary_semaphore back_{0};
  std::mutex mutex_;  // workers of an actor call at once
  int running_ = 0, total_ = 0;
  std::string trace_, missed_;
};

}  // namespace torch_ckpt
