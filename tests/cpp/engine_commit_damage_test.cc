// Commits over what is damaged, was taken apart, or comes from a stranger.
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>

#include "engine/commit/previous.h"
#include "engine/upkeep/remove.h"
#include "engine_commit_test_util.h"

namespace torch_ckpt {
namespace {

namespace fs = std::filesystem;

class DamageTest : public CommitTest {
 protected:
  std::string Place() const { return Path("c/") + std::string(kStageSuffix); }
  std::string Committed() const { return Place() + "/committed"; }
  // The one file of the committed save that has this name in the end.
  std::string StagedAs(const std::string& name) {
    for (const std::string& each : Names(Committed())) {
      if (each.starts_with(name + ".") && !each.ends_with(".header")) {
        return Committed() + "/" + each;
      }
    }
    return {};
  }

#ifdef TORCH_CKPT_FAULTS
  // A save of new_ over old_ whose calls all fail from the first one on of
  // which `from` says so, but for those after which nothing is left to do.
  void KillAt(const std::function<bool(const FaultSite&)>& from) {
    fs::remove_all(Path("c"));
    ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
    bool dead = false;
    std::mutex mutex;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      std::lock_guard<std::mutex> lock(mutex);
      dead = dead || from(site);
      return {.sys_errno = dead ? EIO : 0};
    });
    EXPECT_FALSE(SaveAll(Path("c"), Pieces(new_)).ok());
    SetFaultHook(nullptr);
    EXPECT_TRUE(dead);
  }
  // Right behind the commit point.
  void KillBehindTheCommit() {
    bool committed = false;
    KillAt([&](const FaultSite& site) {
      const bool before = committed;
      committed = committed || (site.op == std::string("renameat") &&
                                site.path2 == Committed());
      return before;
    });
    ASSERT_TRUE(fs::exists(Committed() + "/commit.json"));
  }
#endif
};

#ifdef TORCH_CKPT_FAULTS

// A replay begins when it is sure that it can end.
TEST_F(DamageTest, ACommitOfWhichSomethingIsMissingTouchesNothing) {
  const auto name = ShardFileName(1, 1, 1);
  const std::function<void()> damages[] = {
      [&] { fs::remove(StagedAs(name)); },
      [&] { fs::resize_file(StagedAs(name), 9); },
      [&] {  // another save's, of the same size
        const std::string staged = StagedAs(name);
        fs::remove(staged);
        fs::copy(Path("c/" + name), staged);
      },
      [&] { fs::remove(StagedAs("torch_ckpt.json")); },
      [&] { WriteText(StagedAs("torch_ckpt.json"), "{}"); },
  };
  for (size_t d = 0; d < std::size(damages); ++d) {
    KillBehindTheCommit();
    damages[d]();
    const auto before = Names(Path("c"));
    const Status recovered = RecoverDirectory(Path("c")).status();
    EXPECT_TRUE(recovered.kind() == ErrorKind::kIncomplete ||
                recovered.kind() == ErrorKind::kCorrupt)
        << d << recovered.ToString();
    EXPECT_NE(recovered.message().find("remove this directory"),
              std::string::npos)
        << recovered.ToString();
    EXPECT_EQ(Names(Path("c")), before);
    EXPECT_EQ(BeginSave(Path("c"), false).status().kind(), recovered.kind());
    // As the error says.
    fs::copy(Path("c"), Path("d"), fs::copy_options::recursive);
    fs::remove_all(Committed());
    ExpectHolds(old_);
    // And a save that replaces all needs none of it.
    fs::remove_all(Path("c"));
    fs::rename(Path("d"), Path("c"));
    {
      auto session = BeginSave(Path("c"), true);
      ASSERT_OK(session.status());
      EXPECT_EQ(session->TakeWarnings().size(), 1u);
    }
    ExpectHolds(old_);
    ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
    ExpectHolds(new_);
    ExpectNoStaging();
  }
}

// What vanishes when the replay has begun is not acknowledged either.
TEST_F(DamageTest, AFileThatVanishesInTheReplayIsNotAcknowledged) {
  const auto name = ShardFileName(1, 1, 1);
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  bool vanished = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("renameat") && site.path2 == Path("c/" + name)) {
      // Its directory is called so by now.
      vanished = fs::remove(Committed() / fs::path(site.path).filename());
    }
    return {};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  EXPECT_TRUE(vanished);
  // The old file of this name is there still.
  EXPECT_EQ(saved.kind(), ErrorKind::kCorrupt) << saved.ToString();
  EXPECT_NE(saved.ToString().find(name), std::string::npos) << saved.ToString();
  ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
  ExpectHolds(new_);
  ExpectNoStaging();
}

// What is behind the commit point needs no space.
TEST_F(DamageTest, ADiskThatIsFullBehindTheCommitPoint) {
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", old_, {3, 1})).status());
  bool committed = false;
  int refused = 0;
  std::mutex mutex;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    std::lock_guard<std::mutex> lock(mutex);
    const std::string op = site.op;
    committed = committed || (op == "renameat" && site.path2 == Committed());
    const bool needs =
        op == "pwrite" || op == "mkdirat" || op == "linkat" ||
        op == "fallocate" ||
        (op == "renameat" && site.path2.find("/gone.") != std::string::npos);
    if (committed && needs) ++refused;
    return {.sys_errno = committed && needs ? ENOSPC : 0};
  });
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  SetFaultHook(nullptr);
  EXPECT_OK(saved);
  EXPECT_GT(refused, 0);  // a directory has no room for names
  ExpectHolds(new_);
  EXPECT_FALSE(fs::exists(Path("c/" + ShardFileName(2, 1, 1))));
  ExpectNoStaging();
}

// A place that only its owner may look into hides no whole checkpoint.
TEST_F(DamageTest, APlaceThatAReaderMayNotOpen) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  const auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool no = site.op == std::string("openat") && site.path == Place();
    return {.sys_errno = no ? EACCES : 0};
  });
  ExpectHolds(old_);
  SetFaultHook(nullptr);
}

// The commit looks whether its directory is where others look for it.
TEST_F(DamageTest, ATargetThatWasMovedAwayIsNotCommittedInto) {
  for (const bool inside : {true, false}) {
    fs::remove_all(Path("c"));
    fs::remove_all(Path("moved"));
    fs::create_directory(Path("c"));
    WriteText(Path("c/config.json"), "{}");
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
    if (inside) {
      fs::rename(Path("c"), Path("moved"));
      fs::create_directory(Path("c"));
    } else {
      fs::rename(Place(), Path("moved"));
    }
    const Status committed = CommitSave(&*session, request).status();
    EXPECT_EQ(committed.kind(), ErrorKind::kConflict) << committed.ToString();
    EXPECT_FALSE(fs::exists(Path("c/torch_ckpt.json")));
  }
}

// Two that made their directories after both had looked: save_id names the one
// that may commit.
TEST_F(DamageTest, TheOneThatIsNamedLastCommits) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  std::optional<SaveSession> earlier;
  CommitRequest request;
  bool inside = false;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("mkdirat") && !inside && !earlier &&
        site.path.starts_with(Place() + "/")) {
      inside = true;
      ReleaseLocks(root(), /*flocks_only=*/false);
      auto session = BeginSave(Path("c"), true);
      if (session.ok()) {
        earlier.emplace(std::move(session).value());
        EXPECT_OK(
            WriteRanks(earlier->place().path, Pieces(new_), {}, &request));
      }
    }
    return {};
  });
  auto later = BeginSave(Path("c"), true);
  SetFaultHook(nullptr);
  ASSERT_OK(later.status());
  ASSERT_TRUE(earlier.has_value());
  EXPECT_EQ(CommitSave(&*earlier, request).status().kind(),
            ErrorKind::kConflict);
  ExpectHolds(old_);
}

#endif  // TORCH_CKPT_FAULTS

// A run that saves to one path goes on, whatever became of the last manifest.
TEST_F(DamageTest, ADamagedManifestIsReplaced) {
  const std::function<void(const std::string&)> damages[] = {
      [](const std::string& path) { WriteText(path, ""); },
      [](const std::string& path) { fs::resize_file(path, 100); },
      [](const std::string& path) {
        std::string text = ReadText(path);
        text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
        WriteText(path, text);
      }};
  for (const auto& damage : damages) {
    for (const bool removes : {false, true}) {
      fs::remove_all(Path("c"));
      ASSERT_OK(SaveAll(Path("c"), GridPieces("a", old_, {3, 1})).status());
      WriteText(Path("c/config.json"), "{}");
      damage(Path("c/torch_ckpt.json"));
      EXPECT_EQ(OpenCheckpoint(Path("c")).status().kind(), ErrorKind::kCorrupt);
      if (removes) {
        const auto removed = RemoveCheckpoint(Path("c"));
        ASSERT_OK(removed.status());
        EXPECT_EQ(removed->left, std::vector<std::string>{"config.json"});
        EXPECT_EQ(removed->warnings.size(), 1u);
        continue;
      }
      EXPECT_EQ(BeginSave(Path("c"), false).status().kind(),
                ErrorKind::kConflict);
      {
        auto session = BeginSave(Path("c"), true);
        ASSERT_OK(session.status());
        const auto warnings = session->TakeWarnings();
        ASSERT_EQ(warnings.size(), 1u);
        EXPECT_NE(warnings[0].find("torch_ckpt.json"), std::string::npos);
      }
      ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
      ExpectHolds(new_);
      EXPECT_FALSE(fs::exists(Path("c/" + ShardFileName(2, 1, 1))));
      EXPECT_TRUE(fs::exists(Path("c/config.json")));
    }
  }
}

// Whichever bit it is: none makes a manifest of a newer version of it, which
// nobody would replace.
TEST_F(DamageTest, AnyFlippedBitOfTheManifestIsDamage) {
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", old_, {3, 1})).status());
  const std::string text = ReadText(Path("c/torch_ckpt.json"));
  const auto directory = Directory::Open(Path("c"));
  ASSERT_OK(directory.status());
  for (size_t i = 0; i < text.size() * 8; ++i) {
    std::string flipped = text;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << i % 8));
    WriteText(Path("c/torch_ckpt.json"), flipped);
    const auto previous = ReadPrevious(*directory);
    ASSERT_OK(previous.status());
    EXPECT_EQ(previous->damage.kind(), ErrorKind::kCorrupt) << i;
    EXPECT_TRUE(previous->manifest);
  }
}

// No link in what somebody hands over leads a save out of it.
TEST_F(DamageTest, LinksOfAStrangerLeadNowhere) {
  fs::create_directory(Path("home"));
  WriteText(Path("home/key"), "secret");
  Journal journal;
  journal.manifest.save_id = std::string(32, 'a');
  ManifestFile& file = journal.manifest.files.emplace_back();
  file.name = "key";
  file.id = std::string(32, 'b');
  file.role = FileRole::kExtra;
  file.container = Container::kRaw;
  file.bytes = 6;
  file.crc32c = {0};
  journal.renames.push_back({"key", "key"});
  for (const bool whole : {true, false}) {
    fs::remove_all(Path("c"));
    fs::create_directories(Place());
    if (whole) {
      WriteText(Path("home/commit.json"), EncodeJournal(journal));
      fs::create_directory_symlink(Path("home"), Committed());
    } else {
      fs::create_directory(Committed());
      WriteText(Committed() + "/commit.json", EncodeJournal(journal));
      fs::create_symlink(Path("home/key"), Committed() + "/key");
    }
    EXPECT_FALSE(OpenCheckpoint(Path("c")).ok());
    EXPECT_EQ(RecoverDirectory(Path("c")).ok(), whole);
    ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
    ExpectHolds(new_);
    EXPECT_EQ(ReadText(Path("home/key")), "secret");
    EXPECT_FALSE(fs::exists(Path("c/key")));
    EXPECT_TRUE(!whole || fs::exists(Path("home/commit.json")));
  }
}

// A directory under the name of a file that goes is not that file.
TEST_F(DamageTest, ADirectoryThatAStrangersJournalRemovesStays) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  fs::create_directories(Path("c/mine"));
  WriteText(Path("c/mine/notes"), "x");
  Journal journal;
  journal.manifest.save_id = std::string(32, 'a');
  journal.removes = {"mine"};
  fs::create_directories(Committed());
  WriteText(Committed() + "/commit.json", EncodeJournal(journal));
  EXPECT_EQ(OpenCheckpoint(Path("c")).status().kind(), ErrorKind::kIncomplete);
  ASSERT_OK(RecoverDirectory(Path("c")).status());
  EXPECT_EQ(ReadText(Path("c/mine/notes")), "x");
}

}  // namespace
}  // namespace torch_ckpt
