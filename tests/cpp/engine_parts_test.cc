#include <atomic>
#include <cerrno>
#include <string>

#include "engine/commit/rank_parts.h"
#include "engine/open/rank_manifests.h"
#include "engine/read/verify_job.h"
#include "engine_test_util.h"
#include "os/fault.h"

namespace torch_ckpt {
namespace {

const std::string kRun(32, 'a'), kOtherRun(32, 'b');

ManifestPart PartOf(int64_t rank, int64_t world, uint64_t sequence = 0,
                    const std::string& run = kRun) {
  return {rank, world, run, sequence};
}

// Writes what `pieces` give to the rank into the staging of its part.
Status WritePart(const PartSession& session, const std::vector<Piece>& pieces,
                 CommitRequest* request, const std::string& object = {}) {
  std::vector<Piece> mine;
  for (const Piece& piece : pieces) {
    if (piece.rank == session.part().rank) mine.push_back(piece);
  }
  RankWork work;
  SaveSettings settings;
  PlanRank(session.part().rank, mine, settings, &work);
  if (!object.empty()) {
    WriteFile objects;
    objects.name = ObjectFileName(session.part().rank);
    objects.role = FileRole::kObjects;
    work.sources.push_back(BytesSource(object));
    objects.raw = {work.sources.size() - 1};
    work.plan.files.push_back(std::move(objects));
    request->objects.push_back({"step", ObjectFileName(session.part().rank)});
  }
  work.plan.staging = session.path();
  Job job;
  TC_ASSIGN_OR_RETURN(const WrittenPlan written,
                      RunWriteJob(work.plan, work.sources, &job));
  for (const StagedFile& file : written.files) {
    request->files.push_back(file);
  }
  return {};
}

Status SavePart(const std::string& target, const ManifestPart& part,
                const std::vector<Piece>& pieces,
                const std::string& object = {}) {
  TC_ASSIGN_OR_RETURN(PartSession session, BeginPart(target, part));
  CommitRequest request;
  TC_RETURN_IF_ERROR(WritePart(session, pieces, &request, object));
  return CommitPart(&session, request).status();
}

class PartsTest : public EngineTest {
 protected:
  const Array rows_ = MakeArray(Dtype::kF32, {8, 5}, 1);
  const Array whole_ = MakeArray(Dtype::kBF16, {3, 4}, 2);

  // Two ranks: a tensor that is divided, and one that both hold.
  std::vector<Piece> Pieces() const {
    std::vector<Piece> pieces = GridPieces("rows", rows_, {2, 1});
    pieces.push_back(WholePiece("whole", whole_, 0));
    pieces.push_back(WholePiece("whole", whole_, 1));
    return pieces;
  }
  std::string Target() const { return Path("t"); }
  Status Save(int64_t rank, uint64_t sequence = 0,
              const std::string& run = kRun) const {
    return SavePart(Target(), PartOf(rank, 2, sequence, run), Pieces(),
                    "step of " + std::to_string(rank));
  }
  void ExpectWhole() const {
    const auto all = ReadAll(Target());
    ASSERT_TRUE(all.ok()) << all.status().ToString();
    EXPECT_EQ(all->at("rows"), rows_.bytes);
    EXPECT_EQ(all->at("whole"), whole_.bytes);
    EXPECT_EQ(all->at("step"), "step of 0");
  }
  Status Opened() const { return OpenCheckpoint(Target()).status(); }
};

TEST_F(PartsTest, AllPartsMakeOneCheckpoint) {
  ASSERT_OK(Save(1));
  ASSERT_OK(Save(0));
  ExpectWhole();
  EXPECT_EQ(Names(Target()), (std::vector<std::string>{
                                 "objects-00001.json", "objects-00002.json",
                                 "shard-00001-model-00001-of-00001.safetensors",
                                 "shard-00002-model-00001-of-00001.safetensors",
                                 "torch_ckpt-00001-of-00002.catalog",
                                 "torch_ckpt-00001-of-00002.json",
                                 "torch_ckpt-00002-of-00002.catalog",
                                 "torch_ckpt-00002-of-00002.json"}));
  auto checkpoint = *OpenCheckpoint(Target());
  EXPECT_EQ(checkpoint->source(), kManifestSource);
  EXPECT_EQ(checkpoint->world_size(), 2);
  EXPECT_EQ(checkpoint->files().size(), 6u);
  EXPECT_TRUE(IsId(checkpoint->save_id()));
  Job job;
  const auto report = RunVerifyJob(checkpoint, {}, &job);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->files, 6);
}

#ifdef TORCH_CKPT_FAULTS
// Where a move is a link and an unlink, it may be cut off in between: what has
// both names is ours.
TEST_F(PartsTest, APartThatDiedInTheMiddleOfAMove) {
  bool linked = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::string op = site.op;
    if (linked) return {.sys_errno = EIO};
    if (op == "unlinkat" && site.path.find("shard-00001-") != site.path.npos &&
        std::filesystem::exists(
            Target() + "/shard-00001-model-00001-of-00001.safetensors")) {
      linked = true;
      return {.sys_errno = EIO};
    }
    return {.sys_errno = op == "renameat2" ? EINVAL : 0};
  });
  EXPECT_FALSE(Save(0).ok());
  SetFaultHook(nullptr);
  EXPECT_TRUE(linked);
  ASSERT_OK(Save(0));
  ASSERT_OK(Save(1));
  ExpectWhole();
}
#endif

TEST_F(PartsTest, TheLowestRankOwnsWhatSeveralHold) {
  ASSERT_OK(Save(0));
  ASSERT_OK(Save(1));
  const CheckpointPtr checkpoint = *OpenCheckpoint(Target());
  const Catalog& catalog = checkpoint->catalog();
  const auto parts =
      checkpoint->Placements(static_cast<uint32_t>(catalog.Find("whole")));
  ASSERT_OK(parts.status());
  ASSERT_EQ(parts->size(), 2u);
  EXPECT_EQ((*parts)[0].role, PlacementRole::kOwner);
  EXPECT_EQ((*parts)[1].role, PlacementRole::kReplica);
  EXPECT_NE((*parts)[0].file, (*parts)[1].file);
  const auto step = static_cast<size_t>(catalog.Find("step"));
  EXPECT_EQ(checkpoint->files()[catalog.entries()[step].file].name,
            ObjectFileName(0));
}

TEST_F(PartsTest, MergesAndIsReplacedByAnOrdinarySave) {
  ASSERT_OK(Save(0));
  ASSERT_OK(Save(1));
  ASSERT_OK(Merge(Target(), Path("merged")).status());
  EXPECT_EQ(ReadAll(Path("merged"))->at("rows"), rows_.bytes);
  // In place: the shards stay, the part manifests do not.
  ASSERT_OK(Merge(Target(), Target()).status());
  std::vector<std::string> names = Names(Target());
  EXPECT_TRUE(std::none_of(names.begin(), names.end(), IsPartManifestName));
  EXPECT_TRUE(
      std::binary_search(names.begin(), names.end(),
                         "shard-00002-model-00001-of-00001.safetensors"));
  ExpectWhole();
  // An ordinary save removes what the parts have left.
  ASSERT_OK(SaveAll(Target(), {WholePiece("whole", whole_)}).status());
  EXPECT_EQ(Names(Target()), (std::vector<std::string>{
                                 "shard-00001-model-00001-of-00001.safetensors",
                                 "torch_ckpt.catalog", "torch_ckpt.json"}));
}

TEST_F(PartsTest, AnOrdinarySaveReplacesPartsThatAreNotComplete) {
  ASSERT_OK(Save(1));
  ASSERT_OK(SaveAll(Target(), {WholePiece("whole", whole_)}).status());
  EXPECT_EQ(ReadAll(Target())->size(), 1u);
  EXPECT_EQ(Names(Target()).size(), 3u);
}

TEST_F(PartsTest, AMissingPartIsNamed) {
  for (const int64_t rank : {0, 2, 4}) {
    ASSERT_OK(SavePart(Target(), PartOf(rank, 5), Pieces()));
  }
  const Status status = Opened();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
  EXPECT_NE(status.message().find("rank 1, 3 of 5"), std::string::npos)
      << status.ToString();
  EXPECT_EQ(status.file(), Target());
}

// Of a world that only one small file tells of.
TEST_F(PartsTest, ManyMissingPartsAreCounted) {
  ASSERT_OK(SavePart(Target(), PartOf(1, INT32_MAX), Pieces()));
  const Status status = Opened();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
  EXPECT_NE(status.message().find("rank 0, 2, 3, 4,"), std::string::npos);
  EXPECT_NE(status.message().find("16 and 2147483630 more of 2147483647"),
            std::string::npos)
      << status.ToString();
}

TEST_F(PartsTest, AMissingFileOfAPartIsNamed) {
  ASSERT_OK(Save(0));
  ASSERT_OK(Save(1));
  std::filesystem::remove(Target() + "/objects-00002.json");
  const CheckpointPtr checkpoint = *OpenCheckpoint(Target());
  Job job;
  const Status status = RunVerifyJob(checkpoint, {}, &job).status();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
  EXPECT_NE(status.file().find("objects-00002.json"), std::string::npos);
}

TEST_F(PartsTest, PartsOfDifferentSavesAreAConflict) {
  ASSERT_OK(Save(0));
  ASSERT_OK(SavePart(Path("other"), PartOf(1, 2, 0, kOtherRun), Pieces()));
  for (const std::string& name : Names(Path("other"))) {
    std::filesystem::copy(Path("other/") + name, Target() + "/" + name);
  }
  EXPECT_EQ(Opened().kind(), ErrorKind::kConflict);
}

TEST_F(PartsTest, PartsMustAgreeAndTile) {
  const Array other = MakeArray(Dtype::kF16, {3, 4}, 3);
  ASSERT_OK(Save(0));
  ASSERT_OK(SavePart(Target(), PartOf(1, 2), {WholePiece("whole", other, 1)}));
  Status status = Opened();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_EQ(status.tensor(), "whole");
  EXPECT_NE(status.message().find("BF16 (3, 4) in the part of rank 0"),
            std::string::npos)
      << status.ToString();
  const std::string hole = Path("hole");
  ASSERT_OK(SavePart(hole, PartOf(0, 2), Pieces()));
  ASSERT_OK(SavePart(hole, PartOf(1, 2), {WholePiece("whole", whole_, 1)}));
  status = OpenCheckpoint(hole).status();
  EXPECT_EQ(status.kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(status.tensor(), "rows");
  const std::string overlap = Path("overlap");
  Piece wide = {1, "rows", &rows_, {{3, 0}, {5, 5}}};
  ASSERT_OK(SavePart(overlap, PartOf(0, 2), Pieces()));
  ASSERT_OK(SavePart(overlap, PartOf(1, 2), {wide}));
  EXPECT_EQ(OpenCheckpoint(overlap).status().kind(), ErrorKind::kConflict);
}

TEST_F(PartsTest, ARankWithoutTensorsStillCommits) {
  std::vector<Piece> pieces = {WholePiece("whole", whole_)};
  ASSERT_OK(SavePart(Target(), PartOf(0, 2), pieces));
  EXPECT_EQ(Opened().kind(), ErrorKind::kIncomplete);
  ASSERT_OK(SavePart(Target(), PartOf(1, 2), pieces));
  EXPECT_EQ(ReadAll(Target())->at("whole"), whole_.bytes);
}

TEST_F(PartsTest, NeedsAFreshDirectory) {
  const auto expect_conflict = [&](const Status& status, const char* what) {
    EXPECT_EQ(status.kind(), ErrorKind::kConflict) << what;
    EXPECT_NE(status.message().find(what), std::string::npos)
        << status.ToString();
  };
  ASSERT_OK(Save(0));
  expect_conflict(Save(0), "torch_ckpt-00001-of-00002.json");
  expect_conflict(Save(1, 1), "another save");
  expect_conflict(Save(1, 0, kOtherRun), "another save");
  expect_conflict(SavePart(Target(), PartOf(2, 3), Pieces()), "another save");
  ASSERT_OK(Save(1));
  ExpectWhole();
  const std::string ordinary = Path("ordinary");
  ASSERT_OK(SaveAll(ordinary, {WholePiece("whole", whole_)}).status());
  const std::vector<std::string> before = Names(ordinary);
  expect_conflict(SavePart(ordinary, PartOf(0, 2), Pieces()),
                  "torch_ckpt.json");
  EXPECT_EQ(Names(ordinary), before);
  ASSERT_OK(Directory::Create(Path("stock")));
  WriteText(Path("stock/any.safetensors"), "");
  expect_conflict(SavePart(Path("stock"), PartOf(0, 2), Pieces()),
                  "any.safetensors");
  // What is named as a file of the rank would go with it after a kill.
  ASSERT_OK(Directory::Create(Path("mine")));
  WriteText(Path("mine/objects-00001.json"), "mine");
  expect_conflict(SavePart(Path("mine"), PartOf(0, 1), Pieces()),
                  "objects-00001.json");
  EXPECT_EQ(Names(Path("mine")),
            std::vector<std::string>{"objects-00001.json"});
  // Other files are not in the way.
  ASSERT_OK(Directory::Create(Path("others")));
  WriteText(Path("others/config.json"), "{}");
  ASSERT_OK(SavePart(Path("others"), PartOf(0, 1), {WholePiece("w", whole_)}));
  EXPECT_EQ(ReadAll(Path("others"))->at("w"), whole_.bytes);
  EXPECT_EQ(BeginSave(Path("others"), false).status().kind(),
            ErrorKind::kConflict);
}

TEST_F(PartsTest, RefusesARankOfNoWorld) {
  for (const ManifestPart& part :
       {PartOf(2, 2), PartOf(-1, 2), PartOf(0, 0), PartOf(0, 1, 0, "run")}) {
    EXPECT_EQ(BeginPart(Target(), part).status().kind(),
              ErrorKind::kInvalidArgument);
  }
}

TEST_F(PartsTest, ASecondSaveOfTheRankWaitsForNone) {
  auto first = BeginPart(Target(), PartOf(0, 2));
  ASSERT_OK(first.status());
  EXPECT_EQ(BeginPart(Target(), PartOf(0, 2)).status().kind(),
            ErrorKind::kConflict);
  ASSERT_OK(BeginPart(Target(), PartOf(1, 2)).status());
  // Nor may an ordinary save or recover take it for dead.
  EXPECT_EQ(BeginSave(Target(), true).status().kind(), ErrorKind::kConflict);
  EXPECT_EQ(RecoverDirectory(Target()).status().kind(), ErrorKind::kConflict);
}

// Another node has removed the rank's place, and this one remembers it.
TEST_F(PartsTest, APlaceThatIsRemembered) {
  for (const int error : {ENOENT, ESTALE}) {
    int failed = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const bool looked = site.op == std::string("openat") &&
                          site.path.ends_with(PartStageName(0));
      return {.sys_errno = looked && ++failed <= 3 ? error : 0};
    });
    EXPECT_OK(BeginPart(Target(), PartOf(0, 2)).status());
    SetFaultHook(nullptr);
    EXPECT_GT(failed, 3);
  }
}

TEST_F(PartsTest, AnAbandonedPartLeavesNothing) {
  {
    auto session = BeginPart(Target(), PartOf(0, 2));
    ASSERT_OK(session.status());
    CommitRequest request;
    ASSERT_OK(WritePart(*session, Pieces(), &request));
    EXPECT_EQ(Opened().kind(), ErrorKind::kIncomplete);
  }
  EXPECT_TRUE(Names(Target()).empty());
}

TEST_F(PartsTest, ANameThatIsTakenIsNotRenamedOver) {
  auto session = BeginPart(Target(), PartOf(0, 2));
  ASSERT_OK(session.status());
  CommitRequest request;
  ASSERT_OK(WritePart(*session, Pieces(), &request, "step"));
  const std::string taken = Target() + "/objects-00001.json";
  WriteText(taken, "mine");
  EXPECT_EQ(CommitPart(&*session, request).status().kind(),
            ErrorKind::kConflict);
  {
    const PartSession gone = std::move(*session);
  }
  EXPECT_EQ(Names(Target()), std::vector<std::string>{"objects-00001.json"});
  EXPECT_EQ(ReadText(taken), "mine");
}

#ifdef TORCH_CKPT_FAULTS

// The state of a kill at the n-th call of `op` inside T: the calls after it
// have no effect either, so that nothing is cleaned up.
void SaveAndDie(const std::string& op, int n, const std::string& root,
                const std::function<Status()>& save) {
  int calls = 0;
  bool dead = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (!site.path.starts_with(root)) return {};
    if (site.op == op && ++calls == n) dead = true;
    return dead ? FaultAction{.sys_errno = EIO} : FaultAction{};
  });
  const Status status = save();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.ok(), !dead);
}

TEST_F(PartsTest, AKillBetweenTheRenamesAndTheManifest) {
  // 1 shard, 1 objects file, 1 catalog, then the manifest.
  for (int renames = 1; renames <= 4; ++renames) {
    const std::string target = Path("t" + std::to_string(renames));
    const auto save = [&](int64_t rank, const std::string& run) {
      return SavePart(target, PartOf(rank, 1, 0, run),
                      {WholePiece("whole", whole_)}, "step");
    };
    SaveAndDie("renameat2", renames, target, [&] { return save(0, kRun); });
    const std::vector<std::string> names = Names(target);
    EXPECT_EQ(names.size(), static_cast<size_t>(renames));
    // All of it may be there, but it is not committed.
    const Status status = OpenCheckpoint(target).status();
    EXPECT_EQ(status.kind(), ErrorKind::kIncomplete) << status.ToString();
    if (renames % 2 == 0) {
      // The next save of the rank takes it away, whichever run it is of.
      ASSERT_OK(save(0, kOtherRun));
      EXPECT_EQ(ReadAll(target)->at("whole"), whole_.bytes);
    } else {
      const auto recovered = RecoverDirectory(target);
      ASSERT_OK(recovered.status());
      EXPECT_TRUE(*recovered);
      EXPECT_TRUE(Names(target).empty());
      EXPECT_FALSE(*RecoverDirectory(target));
    }
  }
}

// Nobody waits for the other ranks to come and clean.
TEST_F(PartsTest, WhatOtherRanksOfADeadRunLeftIsNotInTheWay) {
  for (const int64_t rank : {0, 1}) {
    SaveAndDie("renameat2", 2, Target(), [&] { return Save(rank); });
  }
  const std::string stray = "shard-00002-model-00001-of-00001.safetensors";
  EXPECT_TRUE(std::filesystem::exists(Target() + "/" + stray));
  ASSERT_OK(Save(0, 0, kOtherRun));
  // It is of the dead run: neither read, nor taken for the part of rank 1.
  EXPECT_EQ(Opened().kind(), ErrorKind::kIncomplete);
  EXPECT_NE(Opened().message().find("rank 1 of 2"), std::string::npos);
  ASSERT_OK(Save(1, 0, kOtherRun));
  ExpectWhole();
}

TEST_F(PartsTest, ASmallerWorldRemovesWhatADeadLargerOneLeft) {
  for (const int64_t rank : {0, 1}) {
    SaveAndDie("renameat2", 2, Target(), [&] { return Save(rank); });
  }
  ASSERT_OK(SavePart(Target(), PartOf(0, 1, 0, kOtherRun),
                     {WholePiece("whole", whole_)}));
  EXPECT_EQ(ReadAll(Target())->at("whole"), whole_.bytes);
  EXPECT_EQ(Names(Target()), (std::vector<std::string>{
                                 "shard-00001-model-00001-of-00001.safetensors",
                                 "torch_ckpt-00001-of-00001.catalog",
                                 "torch_ckpt-00001-of-00001.json"}));
}

// The manifest is in T; whoever cleans up must not take the part for dead.
TEST_F(PartsTest, AKillAfterTheCommitPointLeavesThePart) {
  ASSERT_OK(Save(1));
  const std::string stage = Target() + "/" + PartStageName(0);
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool removes = std::string(site.op) == "rmdir" && site.path == stage;
    return {.sys_errno = removes ? EBUSY : 0};
  });
  const Status status = Save(0);
  SetFaultHook(nullptr);
  EXPECT_TRUE(std::filesystem::exists(stage));
  // What goes wrong after the commit point makes no error of a save.
  ASSERT_OK(status);
  ExpectWhole();
  EXPECT_EQ(Save(0).kind(), ErrorKind::kConflict);
  EXPECT_FALSE(std::filesystem::exists(stage));
  ExpectWhole();
}

TEST_F(PartsTest, AnErrorAnywhereLeavesNothingOrTheWholePart) {
  ASSERT_OK(Save(1));
  const std::vector<std::string> before = Names(Target());
  int committed = 0, failed = 0;
  for (int n = 1; n < 400; ++n) {
    std::atomic<int> calls = 0;  // workers come here too
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (!site.path.starts_with(Target())) return {};
      return {.sys_errno = ++calls == n ? EIO : 0};
    });
    const Status status = Save(0);
    SetFaultHook(nullptr);
    if (status.ok() && calls < n) break;
    (status.ok() ? committed : failed)++;
    const Status opened = Opened();
    if (opened.ok()) {
      ExpectWhole();
    } else {
      EXPECT_EQ(opened.kind(), ErrorKind::kIncomplete)
          << n << ": " << opened.ToString();
    }
    // What the failing call kept from being cleaned, recover cleans.
    ASSERT_OK(RecoverDirectory(Target()).status());
    if (!opened.ok()) {
      EXPECT_EQ(Names(Target()), before) << n;
    }
    for (const std::string& name : Names(Target())) {
      if (!std::binary_search(before.begin(), before.end(), name)) {
        std::filesystem::remove(Target() + "/" + name);
      }
    }
  }
  EXPECT_GT(failed, 20);
  EXPECT_LT(committed, failed);
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
