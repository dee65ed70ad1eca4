// Savers, removers, recoverers and readers of one directory in many orders, as
// nodes whose file system carries no locks are, or processes of one: whatever
// was acknowledged is there whole, or was replaced by what was acknowledged
// later; readers see whole checkpoints; and the next save works.
//
// The orders: of the pairs of places where one saver stops and another one goes
// on, with and without a death, one in a few (TORCH_CKPT_FULL=1: of places that
// are ten times as many); and a sample of those of three actors.
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/upkeep/remove.h"
#include "engine_commit_test_util.h"
#include "interleaver.h"

#ifdef TORCH_CKPT_FAULTS

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

enum class Kind { kSaver, kRemover, kRecoverer, kReader };

struct Case {
  bool existing = true;
  World world;
  std::vector<Kind> actors;
};

class InterleaveTest : public CommitTest {
 protected:
  static constexpr int kSavers = 3;
  static constexpr int kOld = -1, kNothing = -2;  // what may be there

  void SetUp() override {
    CommitTest::SetUp();
    ASSERT_OK(SaveAll(Path("old"), Grid(0)).status());
    for (int saver = 0; saver < kSavers; ++saver) {
      fs::create_directory(Staged(saver));
      ASSERT_OK(
          WriteRanks(Staged(saver), Grid(saver + 1), {}, &requests_[saver]));
    }
    fs::create_directory(Path("run"));
  }
  std::string Staged(int saver) const {
    return Path("staged" + std::to_string(saver));
  }
  std::string Target() const { return Path("run/c"); }
  // Files come and go from one to the next.
  std::vector<Piece> Grid(int which) {
    constexpr int64_t kFiles[] = {2, 3, 1, 2};
    return GridPieces("a", arrays_[which], {kFiles[which], 1});
  }

  struct Fate {
    int begin = 0, end = 0;  // on the clock of the run; end 0: not yet
    Status status;
  };

  static Status Save(const std::string& target, const std::string& staged,
                     const CommitRequest& request) {
    TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(target, true));
    for (const auto& file : fs::directory_iterator(staged)) {
      std::error_code superseded;  // then there is no such directory
      fs::copy_file(file,
                    fs::path(session.place().path) / file.path().filename(),
                    superseded);
    }
    return CommitSave(&session, request).status();
  }
  // What is at a path; kNothing for Incomplete.
  Result<int> Look(const std::string& path) {
    const auto read = [&]() -> Result<std::string> {
      TC_ASSIGN_OR_RETURN(const CheckpointPtr checkpoint, OpenCheckpoint(path));
      return ReadBox(checkpoint, "a", Box::Whole(arrays_[0].shape), true, 1);
    };
    const Result<std::string> bytes = read();
    if (bytes.status().kind() == ErrorKind::kIncomplete) return int{kNothing};
    TC_RETURN_IF_ERROR(bytes.status());
    for (int which = 0; which <= kSavers; ++which) {
      if (*bytes == arrays_[which].bytes) return which - 1;
    }
    return Internal("a mixture");
  }

  void Try(const Case& c, const std::vector<Turn>& turns) {
    fs::remove_all(Path("run"));
    fs::create_directory(Path("run"));
    if (c.existing) fs::copy(Path("old"), Target());
    fates_.assign(c.actors.size(), {});
    std::vector<Fate>& fates = fates_;
    int clock = 0;
    std::vector<std::function<void()>> acts;
    int savers = 0;
    std::map<size_t, int> saver_of;  // actor to saver
    std::string mixtures;
    for (size_t a = 0; a < c.actors.size(); ++a) {
      if (c.actors[a] == Kind::kSaver) saver_of[a] = savers++;
      acts.push_back([&, a] {
        fates[a].begin = ++clock;
        switch (c.actors[a]) {
          case Kind::kSaver:
            fates[a].status =
                Save(Target(), Staged(saver_of[a]), requests_[saver_of[a]]);
            break;
          case Kind::kRemover:
            fates[a].status = RemoveCheckpoint(Target()).status();
            break;
          case Kind::kRecoverer:
            fates[a].status = RecoverDirectory(Target()).status();
            break;
          case Kind::kReader:
            fates[a].status = Look(Target()).status();
            // Whole or not there, or it was removed in the middle of the look:
            // nothing of that is damage.
            if (!fates[a].status.ok() &&
                fates[a].status.kind() != ErrorKind::kConflict &&
                fates[a].status.sys_errno() != ENOENT &&
                !interleaver_->died(static_cast<int>(a))) {
              mixtures += "a reader: " + fates[a].status.ToString() + "; ";
            }
            break;
        }
        fates[a].end = ++clock;
      });
    }
    interleaver_->Run(c.world, turns, std::move(acts));
    ++runs_;
    std::string wrong = mixtures + CheckEnd(c, fates, saver_of);
    if (wrong.empty()) return;
    std::string order;
    for (const Turn& turn : turns) {
      order += std::to_string(turn.actor) + ":" + std::to_string(turn.calls) +
               (turn.dies ? "+ " : " ");
    }
    for (size_t a = 0; a < fates.size(); ++a) {
      order += "\n" + std::to_string(a) + " (" +
               std::to_string(static_cast<int>(c.actors[a])) + "): " +
               (interleaver_->died(static_cast<int>(a))
                    ? "died"
                    : fates[a].status.ToString());
    }
    ADD_FAILURE() << wrong << "\nexisting " << c.existing << " locks "
                  << c.world.locks << " flags " << c.world.rename_flags
                  << " full " << c.world.full_after << "\n"
                  << order << "\n"
                  << interleaver_->trace();
  }

  // What is wrong at the end; empty if nothing is.
  std::string CheckEnd(const Case& c, const std::vector<Fate>& fates,
                       const std::map<size_t, int>& saver_of) {
    const auto acked = [&](size_t a) {
      return !interleaver_->died(static_cast<int>(a)) && fates[a].end > 0 &&
             fates[a].status.ok() &&
             (c.actors[a] == Kind::kSaver || c.actors[a] == Kind::kRemover);
    };
    // Whether what was there from `end` on may be there still.
    const auto may_stay = [&](size_t self, int end) {
      for (size_t a = 0; a < fates.size(); ++a) {
        if (a != self && acked(a) && fates[a].begin > end) return false;
      }
      return true;
    };
    std::set<int> allowed;
    const size_t nobody = fates.size();
    if (may_stay(nobody, 0)) allowed.insert(c.existing ? kOld : kNothing);
    for (size_t a = 0; a < fates.size(); ++a) {
      const bool dead = interleaver_->died(static_cast<int>(a));
      if (fates[a].begin == 0) continue;
      if (!may_stay(a, dead ? Turn::kToTheEnd : fates[a].end)) continue;
      if (c.actors[a] == Kind::kSaver) allowed.insert(saver_of.at(a));
      if (c.actors[a] == Kind::kRemover) allowed.insert(kNothing);
    }
    // Two looks: before and after what was interrupted is carried out.
    Result<int> found = 0;
    for (const bool recovered : {false, true}) {
      if (recovered) {
        const Status status = RecoverDirectory(Target()).status();
        if (!status.ok()) return "recover: " + status.ToString();
      }
      const Result<int> now = Look(Target());
      if (!now.ok()) return "unreadable: " + now.status().ToString();
      if (recovered && *now != *found) {
        return "recover changed " + std::to_string(*found) + " to " +
               std::to_string(*now);
      }
      found = now;
    }
    if (*found == kNothing && fs::exists(Target()) &&
        !Names(Target()).empty()) {
      return "half of a checkpoint is there";
    }
    if (!allowed.contains(*found)) {
      return "found " + std::to_string(*found) + ", which was replaced";
    }
    const Status next = SaveAll(Target(), Grid(0)).status();
    if (!next.ok()) return "the next save: " + next.ToString();
    if (Names(Target()) != Names(Path("old"))) {
      std::string names;
      for (const std::string& name : Names(Target())) names += name + " ";
      return "left in T: " + names;
    }
    if (Names(Path("run")) != std::vector<std::string>{"c"}) {
      return "left beside T";
    }
    return {};
  }

  // For the campaign's page.
  void Tell() const {
    RecordProperty("runs", runs_);
    if (Full()) std::printf("ORDERS %d\n", runs_);
  }

  // How many counted calls an actor makes when nobody else is there.
  int Calls(const Case& c, int actor) {
    Case alone = c;
    alone.world.full_after = -1;
    Try(alone, {{actor}});
    return interleaver_->calls(actor);
  }

  // Two preemptions of two savers, with a death at one of them or, of the first
  // saver, after both: so many of all.
  void Pairs(Case c, int one_in, int deaths_one_in, uint32_t seed) {
    c.actors = {Kind::kSaver, Kind::kSaver};
    std::mt19937 random(seed);
    const auto below = [&](int n) {
      return static_cast<int>(random() % static_cast<uint32_t>(n));
    };
    const int n = Calls(c, 0);
    for (int first = 0; first <= n; ++first) {
      // More than alone, where it carries out what the first one has left.
      Try(c, {{0, first}, {1}});
      const int last = interleaver_->calls(1);
      for (int second = 0; second <= last; ++second) {
        for (const int death : {-1, 0, 1, 2}) {
          const int in = death < 0 ? one_in : deaths_one_in;
          if (below(in * kOneInSanitized) != 0) continue;
          std::vector<Turn> turns = {{0, first, death == 0},
                                     {1, second, death == 1}};
          if (death == 2) turns.push_back({0, below(n + 1), true});
          Try(c, turns);
          if (HasFailure()) return;
        }
      }
    }
  }

  // Orders of any actors with up to `most` preemptions and one death.
  void Sample(Case c, int count, int most, uint32_t seed) {
    std::mt19937 random(seed);
    const auto below = [&](int n) {
      return static_cast<int>(random() % static_cast<uint32_t>(n));
    };
    const int n = static_cast<int>(c.actors.size());
    std::vector<int> calls;
    // One that finds another one's work to do makes more than alone.
    for (int a = 0; a < n; ++a) calls.push_back(Calls(c, a) * 3 / 2 + 1);
    const int all = static_cast<int>(c.world.full_after);
    const int runs = count / kOneInSanitized;
    for (int run = 0; run < runs && !HasFailure(); ++run) {
      std::vector<Turn> turns;
      const int length = 1 + below(most);
      for (int t = 0; t < length; ++t) {
        int actor = below(n);
        if (t > 0 && actor == turns.back().actor) actor = (actor + 1) % n;
        turns.push_back({actor, below(calls[static_cast<size_t>(actor)])});
      }
      if (below(2) == 0) turns[static_cast<size_t>(below(length))].dies = true;
      if (all >= 0) c.world.full_after = below(all + 1);
      Try(c, turns);
    }
  }

  const std::vector<Array> arrays_ = {
      MakeArray(Dtype::kF32, {6, 4}, 1), MakeArray(Dtype::kF32, {6, 4}, 2),
      MakeArray(Dtype::kF32, {6, 4}, 3), MakeArray(Dtype::kF32, {6, 4}, 4)};
  CommitRequest requests_[kSavers];
  std::unique_ptr<Interleaver> interleaver_;
  std::vector<Fate> fates_;  // of the last run
  int runs_ = 0;
};

// Orders that are known to have done harm, or to be close to it: docs/design.md
// says what each of them would notice. No locks; T holds a checkpoint.
class InterleavedOrder : public InterleaveTest {
 protected:
  static constexpr int kA = 0, kB = 1, kC = 2;
  const std::string kPlace = "/c/" + std::string(kStageSuffix);
  // What a saver does next: look what is there to be superseded; make its own
  // directory, which nobody has seen so far; commit; move a file, or the
  // manifest, which is the last; take away a journal that it has found.
  const std::string kSweep = "getdents " + kPlace;
  const std::string kMake = "mkdirat " + kPlace + "/";
  const std::string kCommit = "-> " + kPlace + "/committed";
  const std::string kManifest = "-> /c/torch_ckpt.json";
  const std::string kMove = "-> /c/shard-";
  const std::string kRetire = "renameat " + kPlace + "/committed/commit.json";

  static Turn To(int actor, const std::string& before, bool dies = false) {
    return {actor, Turn::kToTheEnd, dies, before};
  }
  // Checks the end as any other, and that each turn ended where it should.
  void Order(std::vector<Kind> actors, const std::vector<Turn>& turns) {
    interleaver_ = std::make_unique<Interleaver>(Path("run"), true);
    Case c;
    c.world.locks = false;
    c.actors = std::move(actors);
    Try(c, turns);
    EXPECT_EQ(interleaver_->missed(), "") << interleaver_->trace();
  }
  const Status& Told(int actor) {
    return fates_[static_cast<size_t>(actor)].status;
  }
};

// B has looked for a journal, and found none, when A commits; then it clears
// the name, or sweeps, and dies. A is in the middle of its replay.
TEST_F(InterleavedOrder, ABeginLeavesACommitAlone) {
  const std::string look = "openat " + kPlace + "/committed";
  for (const std::vector<Turn>& begun :
       {std::vector<Turn>{To(kB, look), To(kB, look)},
        std::vector<Turn>{To(kB, kSweep)}}) {
    std::vector<Turn> turns = begun;
    turns.push_back(To(kA, kManifest));
    turns.push_back(To(kB, kMake, /*dies=*/true));
    Order({Kind::kSaver, Kind::kSaver}, turns);
    EXPECT_OK(Told(kA));
  }
}

// A commits, and dies, while B is about to supersede it: what B does not find
// any more it looks for, and is not told in the end that A stands in its way.
TEST_F(InterleavedOrder, WhatCannotBeSupersededIsCarriedOut) {
  Order({Kind::kSaver, Kind::kSaver},
        {To(kA, kCommit), To(kB, "-> " + kPlace + "/dead-"),
         To(kA, kMove, /*dies=*/true)});
  EXPECT_OK(Told(kB));
}

// A has looked before B made its directory, and commits when B has looked for
// the last time: B replaces what it has not seen, and leaves nothing of it.
TEST_F(InterleavedOrder, ACommitBehindTheLastLookIsReplacedWhole) {
  Order({Kind::kSaver, Kind::kSaver},
        {To(kA, kMake), To(kB, kCommit), {kA}, {kB}});
  EXPECT_OK(Told(kA));
  EXPECT_OK(Told(kB));
}

// C has carried out what A left when it died, as B does; B commits, and is in
// the middle of its replay when C goes on.
TEST_F(InterleavedOrder, NobodyTakesAwayAnotherOnesJournal) {
  Order({Kind::kSaver, Kind::kSaver, Kind::kRecoverer},
        {To(kA, kMove, /*dies=*/true),
         To(kC, kRetire),
         To(kB, kManifest),
         To(kB, kManifest),
         {kC}});
  EXPECT_OK(Told(kB));
}

// B has proved its files when A carries out what B has committed, commits, and
// is about to take its own journal away: B, which goes on, has nothing left to
// move, and nowhere to move to what stands in T.
TEST_F(InterleavedOrder, WhoStoodStillInAReplayTouchesNothing) {
  const std::string journal = "/commit.json -> ";
  Order({Kind::kSaver, Kind::kSaver}, {To(kB, kCommit),
                                       To(kB, "getdents " + kPlace + "/"),
                                       To(kB, "openat"),
                                       To(kA, journal),
                                       To(kA, journal),
                                       {kB},
                                       {kA}});
  EXPECT_OK(Told(kA));
  EXPECT_EQ(Told(kB).kind(), ErrorKind::kConflict) << Told(kB).ToString();
}

class InterleavedPairs : public InterleaveTest,
                         public ::testing::WithParamInterface<int> {};

TEST_P(InterleavedPairs, EndWhole) {
  interleaver_ = std::make_unique<Interleaver>(Path("run"), Full());
  Case c;
  c.existing = (GetParam() & 1) != 0;
  c.world.locks = (GetParam() & 2) != 0;
  c.world.rename_flags = (GetParam() & 4) != 0;
  // Where locks hold, most orders end at them; and over what is there already
  // nothing asks for those flags.
  const bool same = c.existing && !c.world.rename_flags;
  int alive = c.world.locks || same ? 60 : 4;
  int deaths = c.world.locks || same ? 120 : 30;
  if (Full()) {  // of about ten times as many
    alive = c.world.locks || same ? 30 : 3;
    deaths = 3 * alive;
  }
  Pairs(c, alive, deaths, static_cast<uint32_t>(GetParam()));
  Tell();
}

INSTANTIATE_TEST_SUITE_P(Worlds, InterleavedPairs, ::testing::Range(0, 8));

class Interleaved : public InterleaveTest,
                    public ::testing::WithParamInterface<int> {
 protected:
  void All(std::vector<Kind> actors, int count, int full_after = -1,
           bool locks = false) {
    interleaver_ = std::make_unique<Interleaver>(Path("run"), true);
    Case c;
    c.existing = (GetParam() & 1) != 0;
    c.world.rename_flags = (GetParam() & 2) != 0;
    c.world.locks = locks;
    c.world.full_after = full_after;
    c.actors = std::move(actors);
    Sample(c, Full() ? 60 * count : count, Full() ? 4 : 3,
           static_cast<uint32_t>(GetParam()));
    Tell();
  }
};

TEST_P(Interleaved, ThreeSavers) {
  All({Kind::kSaver, Kind::kSaver, Kind::kSaver}, 100);
}
TEST_P(Interleaved, SaversAndARecoverer) {
  All({Kind::kSaver, Kind::kRecoverer, Kind::kSaver}, 60);
}
TEST_P(Interleaved, SaversAndAReader) {
  All({Kind::kSaver, Kind::kReader, Kind::kSaver, Kind::kReader}, 60);
}
TEST_P(Interleaved, SaversAndARemover) {
  All({Kind::kSaver, Kind::kRemover, Kind::kSaver}, 60);
}
TEST_P(Interleaved, AFullDisk) {
  All({Kind::kSaver, Kind::kRecoverer, Kind::kReader}, 60, 150);
}
TEST_P(Interleaved, AFullDiskOfTwoSavers) {
  All({Kind::kSaver, Kind::kSaver, Kind::kReader}, 60, 250);
}
TEST_P(Interleaved, EveryKindWithLocks) {
  All({Kind::kSaver, Kind::kRemover, Kind::kRecoverer, Kind::kSaver,
       Kind::kReader},
      60, -1, true);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Interleaved, ::testing::Range(0, 4));

}  // namespace
}  // namespace torch_ckpt

#endif  // TORCH_CKPT_FAULTS
