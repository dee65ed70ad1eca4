// What the caches of a network file system show of what another node has done:
// names that are gone, files that are not there yet, for a while.
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>

#include "engine/open/checkpoint.h"
#include "engine_commit_test_util.h"
#include "os/fault.h"

namespace torch_ckpt {
namespace {

using Clock = std::chrono::steady_clock;

class LateViewTest : public CommitTest {
 protected:
  void SetUp() override {
    CommitTest::SetUp();
    ASSERT_OK(SaveAll(Path("c"), Pieces(old_)).status());
  }
  void TearDown() override {
    SetFaultHook(nullptr);
    CommitTest::TearDown();
  }
  // Calls `op` on names that end in `name` fail `times` times. `shared`: the
  // kind of the file system cannot be told.
  void Fail(const std::string& op, const std::string& name, int error,
            int times, bool shared) {
    failed_ = 0;
    SetFaultHook([=, this](const FaultSite& site) -> FaultAction {
      if (shared && site.op == std::string("fstatfs")) {
        return {.sys_errno = EIO};
      }
      if (site.op != op || !site.path.ends_with(name)) return {};
      const std::scoped_lock lock(mutex_);  // workers open side by side
      if (failed_ == times) return {};
      ++failed_;
      return {.sys_errno = error};
    });
  }
  std::mutex mutex_;
  int failed_ = 0;
};

TEST_F(LateViewTest, AFileThatIsNotSeenYet) {
  Fail("openat", ".safetensors", ENOENT, 3, /*shared=*/true);
  EXPECT_OK(ReadAll(Path("c")).status());
  EXPECT_EQ(failed_, 3);
  // A local file system shows what there is: each worker looks once.
  Fail("openat", ".safetensors", ENOENT, 3, /*shared=*/false);
  EXPECT_EQ(ReadAll(Path("c")).status().kind(), ErrorKind::kIncomplete);
  EXPECT_LE(failed_, 2);
}

TEST_F(LateViewTest, AHandleThatIsStale) {
  for (const std::string op : {"openat", "fstat", "pread"}) {
    for (const std::string name :
         {"torch_ckpt.json", "torch_ckpt.catalog", ".safetensors"}) {
      Fail(op, name, ESTALE, 3, /*shared=*/true);
      if (op == "pread" && name == ".safetensors") failed_ = 2;
      const Status read = ReadAll(Path("c")).status();
      EXPECT_TRUE(read.ok()) << op << " " << name << ": " << read.ToString();
      EXPECT_EQ(failed_, 3) << op << " " << name;
    }
  }
}

TEST_F(LateViewTest, ACheckpointThatIsNotSeenYet) {
  std::filesystem::rename(Path("c"), Path("later"));
  int looks = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("fstatfs")) return {.sys_errno = EIO};
    if (site.op == std::string("openat") && site.path == Path("c") &&
        ++looks == 4) {
      std::filesystem::rename(Path("later"), Path("c"));
    }
    return {};
  });
  EXPECT_OK(ReadAll(Path("c")).status());
  EXPECT_EQ(looks, 4);
}

// What a client has in its cache of a file that another node writes into.
TEST_F(LateViewTest, BytesThatAreNotSeenYet) {
  std::string data;
  for (const std::string& name : Names(Path("c"))) {
    if (name.ends_with(".safetensors")) data = Path("c") + "/" + name;
  }
  const auto size = std::filesystem::file_size(data);
  const auto flip_last = [&] {
    std::fstream file(data, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(size) - 1);
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(size) - 1);
    file.put(static_cast<char>(byte ^ 1));
  };
  flip_last();
  EXPECT_EQ(ReadAll(Path("c")).status().kind(), ErrorKind::kCorrupt);
  int opens = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("fstatfs")) return {.sys_errno = EIO};
    if (site.op == std::string("openat") && site.path == data && ++opens == 4) {
      flip_last();
    }
    return {};
  });
  EXPECT_OK(ReadAll(Path("c")).status());
  EXPECT_GE(opens, 4);
}

// A merge has many pieces: one that could not be read is read again.
TEST_F(LateViewTest, AMergeReadsAnewWhatWasStale) {
  Fail("preadv2", ".safetensors", ESTALE, 3, /*shared=*/true);
  EXPECT_OK(Merge(Path("c"), Path("out")).status());
  EXPECT_EQ(failed_, 3);
  SetFaultHook(nullptr);
  EXPECT_TRUE(*ReadAll(Path("out")) == *ReadAll(Path("c")));
}

// All doubts about one checkpoint together take the patience of one.
TEST_F(LateViewTest, DamageIsToldInTheEnd) {
  for (const std::string& name : Names(Path("c"))) {
    if (name.ends_with(".safetensors")) {
      std::filesystem::resize_file(Path("c") + "/" + name, 100);
    }
  }
  const auto opened = OpenCheckpoint(Path("c"));
  ASSERT_OK(opened.status());
  Fail("", "", 0, 0, /*shared=*/true);
  const auto begin = Clock::now();
  for (int i = 0; i < 5; ++i) {
    const Status status = (*opened)->file_set()->CheckFiles();
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
  }
  const auto took = Clock::now() - begin;
  EXPECT_GT(took, kPatience / 2);
  EXPECT_LT(took, 4 * kPatience);  // and not five
}

// The files of another save, and a manifest that is still the one before.
TEST_F(LateViewTest, AManifestThatIsSeenLate) {
  std::filesystem::rename(Path("c"), Path("first"));
  ASSERT_OK(SaveAll(Path("c"), Pieces(new_)).status());
  std::filesystem::rename(Path("c") + "/torch_ckpt.json", Path("manifest"));
  std::filesystem::copy(Path("first") + "/torch_ckpt.json", Path("c"));
  std::filesystem::remove_all(Path("first"));
  EXPECT_EQ(ReadAll(Path("c")).status().kind(), ErrorKind::kCorrupt);
  int looks = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("fstatfs")) return {.sys_errno = EIO};
    if (site.op == std::string("openat") &&
        site.path.ends_with("/torch_ckpt.json") && ++looks == 4) {
      std::filesystem::rename(Path("manifest"), Path("c") + "/torch_ckpt.json");
    }
    return {};
  });
  EXPECT_EQ(ReadAll(Path("c")).status().kind(), ErrorKind::kConflict);
  EXPECT_GE(looks, 4);
  ExpectHolds(new_);
}

TEST_F(LateViewTest, ASaveWhosePlaceIsRemembered) {
  const std::string place = Path("c") + "/.torch_ckpt-stage";
  for (const int error : {ENOENT, ESTALE}) {
    Fail("openat", "/.torch_ckpt-stage", error, 3, /*shared=*/true);
    EXPECT_OK(SaveAll(Path("c"), Pieces(new_)).status());
    EXPECT_EQ(failed_, 3);
    SetFaultHook(nullptr);
    ExpectHolds(new_);
    ExpectNoStaging();
  }
  // It is remembered when it is made, too.
  for (const int error : {ENOENT, ESTALE}) {
    int made = 0, looked = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "mkdirat" && site.path == place && ++made < 4) {
        return {.sys_errno = EEXIST};
      }
      if (op == "fstatat" && site.path == place && ++looked < 4 && made < 4) {
        return {.sys_errno = error};
      }
      return {};
    });
    EXPECT_OK(SaveAll(Path("c"), Pieces(old_)).status());
    SetFaultHook(nullptr);
    EXPECT_EQ(made, 4);
    ExpectHolds(old_);
  }
}

// sshfs asks by path, also for what is open: of what another node has removed
// it says ENOENT.
TEST_F(LateViewTest, AnOpenDirectoryThatIsGone) {
  for (const int error : {ENOENT, ESTALE}) {
    auto session = BeginSave(Path("c"), true);
    ASSERT_OK(session.status());
    CommitRequest request;
    const std::string staging = session->place().path;
    ASSERT_OK(WriteRanks(staging, Pieces(new_), {}, &request));
    SetFaultHook([=](const FaultSite& site) -> FaultAction {
      const bool gone =
          site.op == std::string("openat")
              ? site.path.starts_with(staging + "/")
              : site.op == std::string("fstat") && site.path == staging;
      return {.sys_errno = gone ? error : 0};
    });
    const Status saved = CommitSave(&*session, request).status();
    SetFaultHook(nullptr);
    EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
    EXPECT_NE(saved.message().find("another save"), std::string::npos);
    ExpectHolds(old_);
  }
}

TEST_F(LateViewTest, ANameThatLeadsNowhereForLong) {
  Fail("openat", "/.torch_ckpt-stage", ESTALE, 1000, /*shared=*/false);
  const Status saved = SaveAll(Path("c"), Pieces(new_)).status();
  EXPECT_EQ(saved.kind(), ErrorKind::kConflict) << saved.ToString();
  SetFaultHook(nullptr);
  ExpectHolds(old_);
}

// Whatever stat says of its size; in /proc that is 0.
TEST_F(LateViewTest, FilesAreReadToTheirEnd) {
  const auto directory = Directory::Open("/proc/self");
  ASSERT_OK(directory.status());
  const auto text = directory->ReadFile("status", 1 << 20);
  ASSERT_OK(text.status());
  EXPECT_NE(text->find("Pid:"), std::string::npos);
  const Status refused = directory->ReadFile("status", 10).status();
  EXPECT_EQ(refused.kind(), ErrorKind::kCorrupt) << refused.ToString();
}

}  // namespace
}  // namespace torch_ckpt
