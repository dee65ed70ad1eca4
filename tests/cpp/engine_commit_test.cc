// Sessions, locks and the commit, without failing calls
// (engine_commit_fault_test.cc) and without crashes (engine_crash_test.cc).
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/commit/commit.h"
#include "engine_commit_test_util.h"

namespace torch_ckpt {
namespace {

TEST_F(CommitTest, TheSecondSaveLosesBeforeAnyByte) {
  for (const bool existing : {false, true}) {
    if (existing) ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
    auto first = BeginSave(Path("c"), true);
    ASSERT_OK(first.status());
    EXPECT_EQ(first->place().fresh, !existing);
    auto second = BeginSave(Path("c"), true);
    EXPECT_EQ(second.status().kind(), ErrorKind::kConflict);
    EXPECT_NE(second.status().message().find("in progress"), std::string::npos);
    EXPECT_TRUE(Names(first->place().path).empty());
    EXPECT_EQ(Names(first->place().root),
              (std::vector<std::string>{".lock", first->save_id(), "save_id"}));
    // Neither may `recover` take it away.
    EXPECT_EQ(RecoverDirectory(Path("c")).status().kind(),
              ErrorKind::kConflict);
    CommitRequest request;
    ASSERT_OK(WriteRanks(first->place().path, Pieces(new_), {}, &request));
    ASSERT_OK(CommitSave(&*first, request).status());
    ExpectHolds(new_);
    ExpectNoStaging();
  }
}

TEST_F(CommitTest, OverwriteFalseRefusesAnyCheckpoint) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  EXPECT_EQ(BeginSave(Path("c"), false).status().kind(), ErrorKind::kConflict);
  ExpectNoStaging();
  ExpectHolds(old_);
  std::filesystem::create_directory(Path("hub"));
  WriteText(Path("hub/model.safetensors"), "x");
  EXPECT_EQ(BeginSave(Path("hub"), false).status().kind(),
            ErrorKind::kConflict);
  EXPECT_EQ(Names(Path("hub")), std::vector<std::string>{"model.safetensors"});
  std::filesystem::create_directory(Path("other"));
  WriteText(Path("other/config.json"), "{}");
  EXPECT_TRUE(BeginSave(Path("other"), false).ok());
  EXPECT_TRUE(BeginSave(Path("absent"), false).ok());
}

TEST_F(CommitTest, EverySessionThatEndsCleansUp) {
  {
    ASSERT_OK(BeginSave(Path("c"), true).status());
  }
  EXPECT_TRUE(Names(root()).empty());
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  {
    auto session = BeginSave(Path("c"), true);
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
  }
  ExpectNoStaging();
  ExpectHolds(old_);
}

TEST_F(CommitTest, OtherRanksFindTheSession) {
  const auto now = std::chrono::milliseconds(0);
  EXPECT_EQ(JoinSave(Path("c"), now).status().kind(), ErrorKind::kIncomplete);
  auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  auto joined = JoinSave(Path("c"));
  ASSERT_OK(joined.status());
  EXPECT_EQ(joined->save_id, session->save_id());
  EXPECT_EQ(joined->staging, session->place().path);
}

// As where the caches of a network file system hide a new directory.
TEST_F(CommitTest, OtherRanksWaitForTheSession) {
  std::optional<SaveSession> session;
  std::jthread coordinator([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    auto begun = BeginSave(Path("c"), true);
    ASSERT_OK(begun.status());
    session.emplace(std::move(*begun));
  });
  const auto joined = JoinSave(Path("c"));
  coordinator.join();
  ASSERT_OK(joined.status());
  EXPECT_EQ(joined->save_id, session->save_id());
}

// What the ranks name must be what is in staging.
TEST_F(CommitTest, RefusesWhatTheRanksDidNotWrite) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  const auto refuses = [&](ErrorKind kind, auto&& change) {
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
    change(&request, session->place().path);
    const Status status = CommitSave(&*session, request).status();
    EXPECT_EQ(status.kind(), kind) << status.ToString();
  };
  using Request = CommitRequest*;
  using Stage = const std::string&;
  refuses(ErrorKind::kIncomplete,
          [](Request r, Stage) { r->files.pop_back(); });  // a hole
  refuses(ErrorKind::kIo, [](Request r, Stage stage) {
    std::filesystem::remove(stage + "/" + r->files[1].staged);
  });
  refuses(ErrorKind::kCorrupt, [](Request r, Stage stage) {
    std::filesystem::resize_file(stage + "/" + r->files[1].staged, 4100);
  });
  refuses(ErrorKind::kCorrupt,
          [](Request r, Stage) { r->files[0].id = NewId(); });
  refuses(ErrorKind::kCorrupt,
          [](Request r, Stage) { r->files[0].bytes += 1; });
  refuses(ErrorKind::kConflict,
          [](Request r, Stage) { r->files[0].name = r->files[1].name; });
  refuses(ErrorKind::kConflict, [](Request r, Stage) {  // the same box twice
    r->files.push_back(r->files[0]);
    r->files.back().name = "x.safetensors";
  });
  refuses(ErrorKind::kCorrupt,
          [](Request r, Stage) { r->files[0].name = "../x.safetensors"; });
  refuses(ErrorKind::kInvalidArgument, [](Request r, Stage) {
    r->objects.push_back({"step", "objects-00001.json"});
  });
  // A manifest that no reader would take.
  refuses(ErrorKind::kInvalidArgument,
          [](Request r, Stage) { r->files[0].crc32c.clear(); });
  refuses(ErrorKind::kInvalidArgument,
          [](Request r, Stage) { r->files[0].crc32c.push_back(1); });
  ExpectNoStaging();
  ExpectHolds(old_);
}

TEST_F(CommitTest, FilesThatNoRankNamedAreRemoved) {
  for (int round = 0; round < 2; ++round) {
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    WriteText(session->place().path + "/stray", "x");
    CommitRequest request;
    ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
    ASSERT_OK(CommitSave(&*session, request).status());
    EXPECT_EQ(Names(Path("c")),
              (std::vector<std::string>{
                  ShardFileName(0, 1, 1), ShardFileName(1, 1, 1),
                  "torch_ckpt.catalog", "torch_ckpt.json"}));
    ExpectNoStaging();
  }
}

TEST_F(CommitTest, FilesFollowTheUmask) {
  const mode_t before = umask(027);
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  umask(before);
  for (const std::string& name : Names(Path("c"))) {
    struct stat info;
    ASSERT_EQ(stat(Path("c/" + name).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0640u) << name;
  }
}

// Nothing outside the directory is touched, whatever stands in it.
TEST_F(CommitTest, LinksInStagingAreNotFollowed) {
  std::filesystem::create_directory(Path("precious"));
  WriteText(Path("precious/file"), "x");
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  const std::string stage = Path("c/") + std::string(kStageSuffix);
  std::filesystem::create_directory_symlink(Path("precious"), stage);
  EXPECT_EQ(BeginSave(Path("c"), true).status().kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(RecoverDirectory(Path("c")).status().kind(), ErrorKind::kCorrupt);
  std::filesystem::remove(stage);
  std::filesystem::create_directory(stage);
  std::filesystem::create_directory_symlink(Path("precious"), stage + "/x");
  ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
  std::filesystem::create_directory_symlink(
      Path("precious"), Path(".c" + std::string(kStageSuffix)));
  EXPECT_EQ(BeginSave(Path("c"), true).status().kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(Names(Path("precious")), std::vector<std::string>{"file"});
  ExpectHolds(new_);
}

TEST_F(CommitTest, TargetsThatCannotBe) {
  WriteText(Path("file"), "x");
  EXPECT_FALSE(BeginSave(Path("file"), true).ok());
  EXPECT_FALSE(BeginSave(Path("file/c"), true).ok());
  EXPECT_FALSE(BeginSave("/", true).ok());
  EXPECT_FALSE(BeginSave("", true).ok());
  std::filesystem::create_symlink(Path("nowhere"), Path("dangling"));
  const Status dangling = BeginSave(Path("dangling"), true).status();
  EXPECT_NE(dangling.message().find("link to nothing"), std::string::npos);
  // A link to a directory is a fine target, and stays one.
  std::filesystem::create_directory(Path("real"));
  std::filesystem::create_directory_symlink(Path("real"), Path("c"));
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  EXPECT_TRUE(std::filesystem::is_symlink(Path("c")));
  ExpectHolds(old_);
  ExpectNoStaging();
}

// Nobody's mode, owner or working directory is replaced.
TEST_F(CommitTest, AnEmptyDirectoryIsKept) {
  std::filesystem::create_directory(Path("c"));
  std::filesystem::permissions(Path("c"), std::filesystem::perms{0700});
  const auto inode = [&] {
    struct stat info = {};
    EXPECT_EQ(stat(Path("c").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0700u);
    return info.st_ino;
  };
  const ino_t before = inode();
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  EXPECT_EQ(inode(), before);
  ExpectHolds(old_);
  ExpectNoStaging();
}

// Another rank makes the directory while the coordinator has begun.
TEST_F(CommitTest, ADirectoryMadeSinceTheBegin) {
  auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  std::filesystem::create_directory(Path("c"));
  auto joined = JoinSave(Path("c"));
  ASSERT_OK(joined.status());
  EXPECT_EQ(joined->save_id, session->save_id());
  CommitRequest request;
  ASSERT_OK(WriteRanks(joined->staging, Pieces(new_), {}, &request));
  ASSERT_OK(CommitSave(&*session, request).status());
  ExpectHolds(new_);
  ExpectNoStaging();
}

// overwrite=False holds until the end.
TEST_F(CommitTest, ACheckpointMadeSinceTheBeginIsNotOverwritten) {
  auto session = BeginSave(Path("c"), false);
  ASSERT_OK(session.status());
  CommitRequest request;
  ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
  ASSERT_OK(SaveAll(Path("d"), Pieces(old_)).status());
  std::filesystem::rename(Path("d"), Path("c"));
  EXPECT_EQ(CommitSave(&*session, request).status().kind(),
            ErrorKind::kConflict);
  {
    const SaveSession ended = std::move(*session);
  }
  ExpectHolds(old_);
  ExpectNoStaging();
}

// What was locked is what is renamed.
TEST_F(CommitTest, AStagingDirectoryThatWasSwapped) {
  auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  CommitRequest request;
  ASSERT_OK(WriteRanks(session->place().path, Pieces(new_), {}, &request));
  std::filesystem::rename(session->place().path, Path("aside"));
  std::filesystem::create_directory(session->place().path);
  EXPECT_EQ(CommitSave(&*session, request).status().kind(),
            ErrorKind::kConflict);
  EXPECT_FALSE(std::filesystem::exists(Path("c")));
}

// After the commit point it would be too late to find that.
TEST_F(CommitTest, ADirectoryWhereAFileMustGo) {
  SaveSettings settings;
  settings.object = "{}";
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_), settings).status());
  // One that the commit would replace, and one that it would remove.
  for (const std::string& name : {ObjectFileName(0), ShardFileName(1, 1, 1)}) {
    std::filesystem::rename(Path("c/" + name), Path("aside"));
    std::filesystem::create_directory(Path("c/" + name));
    SaveSettings with = name == ObjectFileName(0) ? settings : SaveSettings{};
    const Status saved =
        SaveAll(Path("c"), GridPieces("a", new_, {1, 1}), with).status();
    EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
    EXPECT_EQ(saved.file(), Path("c/" + name));
    std::filesystem::remove(Path("c/" + name));
    std::filesystem::rename(Path("aside"), Path("c/" + name));
    ExpectHolds(old_);
    ExpectNoStaging();
  }
  ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
  ExpectHolds(new_);
}

TEST_F(CommitTest, FilesInSubdirectories) {
  namespace fs = std::filesystem;
  SaveSettings below;
  below.below = "data/of/";
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_), below).status());
  ExpectHolds(old_);
  const auto opened = OpenCheckpoint(Path("c"));
  ASSERT_OK(opened.status());
  EXPECT_OK((*opened)->file_set()->CheckFiles());
  // What is not of the checkpoint stays, and so does what holds it.
  WriteText(Path("c/data/notes"), "mine");
  below.below = "data/again/";
  ASSERT_OK(SaveAll(Path("c"), Pieces(new_), below).status());
  ExpectHolds(new_);
  EXPECT_EQ(Names(Path("c/data")),
            (std::vector<std::string>{"again", "notes"}));
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  ExpectHolds(old_);
  EXPECT_EQ(Names(Path("c/data")), (std::vector<std::string>{"notes"}));
  ExpectNoStaging();

  // Where a directory must be there is a file or a link.
  for (const bool link : {false, true}) {
    fs::remove_all(Path("c/data"));
    fs::create_directory(Path("outside"));
    if (link) {
      fs::create_directory_symlink(Path("outside"), Path("c/data"));
    } else {
      WriteText(Path("c/data"), "mine");
    }
    const Status saved = SaveAll(Path("c"), Pieces(new_), below).status();
    EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
    EXPECT_EQ(saved.file(), Path("c/data"));
    ExpectHolds(old_);
    ExpectNoStaging();
  }
  EXPECT_TRUE(fs::is_empty(Path("outside")));
}

// A link among the directories could lead anywhere.
TEST_F(CommitTest, ASubdirectoryThatIsALinkIsNotRead) {
  SaveSettings below;
  below.below = "data/";
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_), below).status());
  std::filesystem::rename(Path("c/data"), Path("elsewhere"));
  std::filesystem::create_directory_symlink(Path("elsewhere"), Path("c/data"));
  const Status read = ReadAll(Path("c")).status();
  EXPECT_EQ(read.sys_errno(), ENOTDIR) << read.ToString();
  EXPECT_FALSE(SaveAll(Path("c"), Pieces(new_)).ok());
  EXPECT_EQ(Names(Path("elsewhere")).size(), 2u);
}

TEST_F(CommitTest, ADamagedJournalIsNamed) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  const std::string stage = Path("c/") + std::string(kStageSuffix);
  std::filesystem::create_directories(stage + "/committed");
  WriteText(stage + "/committed/commit.json", "{}");
  const Status status = OpenCheckpoint(Path("c")).status();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(status.file(), stage + "/committed/commit.json");
  const Status recovered = RecoverDirectory(Path("c")).status();
  EXPECT_EQ(recovered.kind(), ErrorKind::kCorrupt) << recovered.ToString();
  EXPECT_EQ(BeginSave(Path("c"), false).status().kind(), ErrorKind::kCorrupt);
  // Who replaces all that is there needs none of it.
  auto session = BeginSave(Path("c"), true);
  ASSERT_OK(session.status());
  const std::vector<std::string> warnings = session->TakeWarnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("given up"), std::string::npos);
  EXPECT_TRUE(session->TakeWarnings().empty());  // each once
  ExpectHolds(old_);
}

TEST_F(CommitTest, NamesAsLongAsTheyMayBe) {
  const std::string name(255, 'c');
  ASSERT_OK(SaveAll(Path(name), Pieces(old_)).status());
  ASSERT_OK(SaveAll(Path(name), Pieces(new_)).status());
  EXPECT_EQ(ReadAll(Path(name))->at("a"), new_.bytes);
  EXPECT_EQ(Names(root()), std::vector<std::string>{name});
}

// What readers would refuse is refused before anything is replaced.
TEST_F(CommitTest, ObjectNamesThatNoCatalogHolds) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  for (const std::string& name :
       {std::string(65536, 'x'), std::string("\xFF")}) {
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    SaveSettings settings;
    settings.object = "{}";
    CommitRequest request;
    ASSERT_OK(
        WriteRanks(session->place().path, Pieces(new_), settings, &request));
    ASSERT_FALSE(request.objects.empty());
    request.objects[0].name = name;
    EXPECT_EQ(CommitSave(&*session, request).status().kind(),
              ErrorKind::kInvalidArgument);
    ExpectHolds(old_);
  }
}

TEST_F(CommitTest, RecoverWithNothingToDo) {
  EXPECT_FALSE(*RecoverDirectory(Path("c")));
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  EXPECT_FALSE(*RecoverDirectory(Path("c")));
}

// Readers in threads while others overwrite: one of the saves, or a conflict.
TEST_F(CommitTest, ReadersWhileSavesGoOn) {
  ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  std::atomic<bool> stop{false};
  std::atomic<int> good{0}, conflicts{0};
  const auto reader = [&](bool verify) {
    while (!stop) {
      auto all = ReadAll(Path("c"), verify);
      if (all.ok()) {
        ++good;
        if (all->at("a") != old_.bytes && all->at("a") != new_.bytes) {
          ADD_FAILURE() << "a mixture of two saves";
          return;
        }
      } else if (all.status().kind() == ErrorKind::kConflict) {
        ++conflicts;
      } else {
        ADD_FAILURE() << all.status().ToString();
        return;
      }
    }
  };
  std::jthread one(reader, true), two(reader, false);
  for (int i = 0; i < 100; ++i) {
    // The layout changes too: files come and go.
    const Array& a = i % 2 == 0 ? new_ : old_;
    const int64_t ranks = 2 + i % 3;
    EXPECT_OK(SaveAll(Path("c"), GridPieces("a", a, {ranks, 1})).status());
  }
  stop = true;
  one.join();
  two.join();
  EXPECT_GT(good, 0);
}

}  // namespace
}  // namespace torch_ckpt
