#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "os/directory.h"
#include "os/path.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

using DirectoryTest = TemporaryDirectory;
using Names = std::vector<std::string>;

TEST_F(DirectoryTest, WritesListsRenamesAndRemoves) {
  ASSERT_TRUE(dir().WriteFile("b", "two").ok());
  ASSERT_TRUE(dir().WriteFile("a", "one").ok());
  ASSERT_TRUE(dir().MakeDirectory("sub").ok());
  EXPECT_EQ(*dir().List(), (Names{"a", "b", "sub"}));
  EXPECT_EQ(*dir().List(), (Names{"a", "b", "sub"})) << "starts over";
  EXPECT_EQ(*dir().ReadFile("b", 3), "two");

  auto sub = dir().OpenDirectory("sub");
  ASSERT_TRUE(sub.ok());
  EXPECT_EQ(sub->path(), path() + "/sub");
  ASSERT_TRUE(dir().Rename("a", *sub, "c").ok());
  ASSERT_TRUE(dir().Rename("b", *sub, "c").ok()) << "replaces";
  EXPECT_EQ(*sub->ReadFile("c", 10), "two");
  EXPECT_TRUE(sub->Sync().ok());

  EXPECT_EQ(dir().RemoveDirectory("sub", false).sys_errno(), ENOTEMPTY);
  EXPECT_TRUE(sub->Unlink("c", false).ok());
  EXPECT_EQ(sub->Unlink("c", false).sys_errno(), ENOENT);
  EXPECT_TRUE(sub->Unlink("c", true).ok());
  EXPECT_TRUE(dir().RemoveDirectory("sub", false).ok());
  EXPECT_TRUE(dir().RemoveDirectory("sub", true).ok());
  EXPECT_TRUE(dir().List()->empty());
}

TEST_F(DirectoryTest, ListsMoreThanOneBufferful) {
  for (int i = 0; i < 1500; ++i) {
    ASSERT_TRUE(dir()
                    .OpenFile("a-rather-long-file-name-" + std::to_string(i),
                              {.write = true, .create_new = true})
                    .ok());
  }
  auto names = dir().List();
  ASSERT_TRUE(names.ok());
  EXPECT_EQ(names->size(), 1500u);
  EXPECT_TRUE(std::is_sorted(names->begin(), names->end()));
}

TEST_F(DirectoryTest, StatNameTellsMissingFromBroken) {
  ASSERT_TRUE(dir().WriteFile("a", "12345").ok());
  ASSERT_TRUE(dir().MakeDirectory("sub").ok());
  auto file = dir().StatName("a");
  ASSERT_TRUE(file.ok() && file->has_value());
  EXPECT_EQ((*file)->bytes, 5u);
  EXPECT_TRUE((*file)->is_regular);
  EXPECT_TRUE((**dir().StatName("sub")).is_directory);
  auto missing = dir().StatName("no");
  ASSERT_TRUE(missing.ok());
  EXPECT_FALSE(missing->has_value());
  std::filesystem::create_symlink("a", path() + "/link");
  EXPECT_EQ((**dir().StatName("link")).bytes, 5u);
  std::filesystem::create_symlink("link2", path() + "/link2");
  EXPECT_EQ(dir().StatName("link2").status().sys_errno(), ELOOP);
}

TEST_F(DirectoryTest, CreateNewNeverOpensWhatIsThere) {
  const OpenOptions create{.write = true, .create_new = true};
  ASSERT_TRUE(dir().WriteFile("a", "kept").ok());
  EXPECT_EQ(dir().OpenFile("a", create).status().sys_errno(), EEXIST);
  EXPECT_EQ(dir().WriteFile("a", "x").sys_errno(), EEXIST);
  EXPECT_EQ(*dir().ReadFile("a", 10), "kept");
  // A link that leads nowhere must not be created through.
  std::filesystem::create_symlink(path() + "/target", path() + "/link");
  EXPECT_EQ(dir().OpenFile("link", create).status().sys_errno(), EEXIST);
  EXPECT_FALSE(dir().StatName("target")->has_value());
}

// Into memory of its own pages.
TEST_F(DirectoryTest, ReadsLargeFilesWhole) {
  constexpr uint64_t kBytes = (uint64_t{70} << 20) + 1;
  {
    auto file = dir().OpenFile("a", {.write = true, .create_new = true});
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->WriteAll(AsBytes("begin"), 0).ok());
    ASSERT_TRUE(file->WriteAll(AsBytes("end"), kBytes - 3).ok());
  }
  const auto text = dir().ReadFile("a", kBytes);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(text->size(), kBytes);
  EXPECT_TRUE(text->starts_with("begin") && text->ends_with("end"));
  EXPECT_EQ(dir().ReadFile("a", kBytes - 1).status().kind(),
            ErrorKind::kCorrupt);
}

TEST_F(DirectoryTest, ModeFollowsTheUmask) {
  const mode_t old = umask(027);
  const bool made =
      dir().WriteFile("a", "").ok() && dir().MakeDirectory("sub").ok();
  umask(old);
  ASSERT_TRUE(made);
  struct stat st;
  ASSERT_EQ(stat((path() + "/a").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0640u);
  ASSERT_EQ(stat((path() + "/sub").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0750u);
}

TEST_F(DirectoryTest, NamesCannotLeadOut) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../x"),
        std::string("/"), std::string("/a"), std::string("a\0b", 3)}) {
    EXPECT_EQ(dir().OpenFile(name, {}).status().kind(),
              ErrorKind::kInvalidArgument);
    EXPECT_EQ(dir().Unlink(name, true).kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(dir().Rename("a", dir(), name).kind(),
              ErrorKind::kInvalidArgument);
  }
}

TEST_F(DirectoryTest, PathsLeadBelow) {
  ASSERT_TRUE(dir().WriteFile("x", "one").ok());
  ASSERT_TRUE(dir().MakeParents({"a/b/c"}).ok());
  ASSERT_TRUE(dir().MakeParents({"a/b/c"}).ok()) << "they are there";
  EXPECT_EQ(*dir().List(), (Names{"a", "x"}));
  EXPECT_TRUE(dir().CheckReplaceable("a/b/c").ok());
  ASSERT_TRUE(dir().Rename("x", dir(), "a/b/c").ok());
  EXPECT_EQ(*dir().ReadFile("a/b/c", 10), "one");
  EXPECT_TRUE((*dir().StatName("a/b/c")).has_value());
  EXPECT_TRUE(dir().SyncParents({"a/b/c", "a/d", "none/e", "f"}).ok());
  EXPECT_TRUE(dir().RemoveEmptyParents("a/b/c").ok());
  EXPECT_TRUE(std::filesystem::exists(path() + "/a/b/c"));

  // What is not there.
  EXPECT_EQ(dir().ReadFile("a/none/c", 10).status().sys_errno(), ENOENT);
  EXPECT_FALSE((*dir().StatName("none/b/c")).has_value());
  EXPECT_TRUE(dir().CheckReplaceable("none/b/c").ok());
  EXPECT_TRUE(dir().Unlink("none/b/c", true).ok());
  EXPECT_EQ(dir().Unlink("none/b/c", false).sys_errno(), ENOENT);
  EXPECT_TRUE(dir().RemoveEmptyParents("none/b/c").ok());

  // What is in the way.
  ASSERT_TRUE(dir().WriteFile("y", "two").ok());
  EXPECT_EQ(dir().CheckReplaceable("a/b").kind(), ErrorKind::kConflict);
  EXPECT_EQ(dir().CheckReplaceable("a/b/c/d").kind(), ErrorKind::kConflict);
  EXPECT_EQ(dir().MakeParents({"y/b/c"}).sys_errno(), ENOTDIR);

  ASSERT_TRUE(dir().Rename("a/b/c", dir(), "a/d").ok());
  EXPECT_TRUE(dir().RemoveEmptyParents("a/b/c").ok());
  EXPECT_FALSE(std::filesystem::exists(path() + "/a/b"));
  ASSERT_TRUE(dir().Unlink("a/d", false).ok());
  EXPECT_TRUE(dir().RemoveEmptyParents("a/d").ok());
  EXPECT_EQ(*dir().List(), (Names{"y"}));
}

TEST_F(DirectoryTest, PathsLeadThroughNoLink) {
  const std::string outside = path() + "/outside";
  ASSERT_TRUE(dir().MakeParents({"outside/x"}).ok());
  ASSERT_TRUE(dir().MakeParents({"in/side/x"}).ok());
  ASSERT_TRUE(dir().WriteFile("outside/x", "precious").ok());
  ASSERT_TRUE(dir().WriteFile("own", "").ok());
  std::filesystem::create_directory_symlink(outside, path() + "/link");
  std::filesystem::create_directory_symlink(outside, path() + "/in/link");
  for (const std::string way : {"link/x", "in/link/x", "in/side/../link/x",
                                "in/../outside/x", "in//side", "in/side/"}) {
    EXPECT_FALSE(dir().OpenFile(way, {}).ok()) << way;
    EXPECT_FALSE(dir().OpenFile(way, {.write = true}).ok()) << way;
    const OpenOptions create = {.write = true, .create_new = true};
    EXPECT_FALSE(dir().OpenFile(way, create).ok()) << way;
    EXPECT_FALSE(dir().StatName(way).ok()) << way;
    EXPECT_FALSE(dir().Unlink(way, true).ok()) << way;
    EXPECT_FALSE(dir().CheckReplaceable(way).ok()) << way;
    EXPECT_FALSE(dir().Rename(way, dir(), "mine").ok()) << way;
    EXPECT_FALSE(dir().Rename("own", dir(), way).ok()) << way;
  }
  EXPECT_FALSE(dir().MakeParents({"link/y/z"}).ok());
  EXPECT_FALSE(dir().RemoveEmptyParents("link/y").ok());
  EXPECT_FALSE(dir().SyncParents({"link/y"}).ok());
  EXPECT_EQ(*dir().ReadFile("outside/x", 10), "precious");
  EXPECT_EQ(*dir().List(), (Names{"in", "link", "outside", "own"}));
}

TEST_F(DirectoryTest, OnlyRegularFilesOpen) {
  ASSERT_EQ(mkfifo((path() + "/fifo").c_str(), 0600), 0);
  ASSERT_TRUE(dir().MakeDirectory("sub").ok());
  // Returns at all: an open of a FIFO waits for its writer otherwise.
  EXPECT_EQ(dir().ReadFile("fifo", 10).status().kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(dir().OpenFile("sub", {}).status().kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(dir().OpenFile("none", {}).status().sys_errno(), ENOENT);
}

TEST_F(DirectoryTest, ReadFileIsBounded) {
  ASSERT_TRUE(dir().WriteFile("a", "12345").ok());
  EXPECT_EQ(*dir().ReadFile("a", 5), "12345");
  const Status status = dir().ReadFile("a", 4).status();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(status.file(), path() + "/a");
}

#ifdef TORCH_CKPT_FAULTS
// GlusterFS says that a name exists while another node looks for it. And what
// we made, and could remove again, was no other save's.
TEST_F(DirectoryTest, RenameNoReplaceBelievesWhatItSees) {
  for (const std::string first : {"mkdirat", "renameat"}) {
    ASSERT_TRUE(dir().MakeDirectory("x").ok());
    int calls = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "renameat2") return {.sys_errno = EINVAL};
      if (op == first && ++calls < 3) return {.sys_errno = EEXIST};
      return {.skip = op == "sleep"};
    });
    EXPECT_TRUE(dir().RenameNoReplace("x", dir(), "z").ok()) << first;
    SetFaultHook(nullptr);
    EXPECT_EQ(*dir().List(), (Names{"z"}));
    EXPECT_EQ(calls, 3) << first;
    EXPECT_TRUE(dir().RemoveTree("z").ok());
  }
}
#endif

// With RENAME_NOREPLACE, with hard links, and without either.
TEST_F(DirectoryTest, RenameNoReplaceKeepsTheTarget) {
  for (const int lacks : {0, 1, 2}) {
#ifdef TORCH_CKPT_FAULTS
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      const std::string op = site.op;
      if (op == "renameat2" && lacks > 0) return {.sys_errno = EINVAL};
      if (op == "linkat" && lacks > 1) return {.sys_errno = EPERM};
      return {};
    });
#endif
    ASSERT_TRUE(dir().WriteFile("a", "1").ok());
    ASSERT_TRUE(dir().WriteFile("b", "2").ok());
    EXPECT_EQ(dir().RenameNoReplace("a", dir(), "b").kind(),
              ErrorKind::kConflict);
    EXPECT_EQ(*dir().ReadFile("b", 1), "2");
    EXPECT_EQ(*dir().ReadFile("a", 1), "1");
    EXPECT_TRUE(dir().RenameNoReplace("a", dir(), "c").ok());
    EXPECT_EQ(*dir().List(), (Names{"b", "c"}));
    EXPECT_EQ(dir().RenameNoReplace("no", dir(), "d").sys_errno(), ENOENT);
    ASSERT_TRUE(dir().MakeDirectory("x").ok());
    ASSERT_TRUE(dir().MakeDirectory("y").ok());
    for (const char* taken : {"y", "b"}) {
      EXPECT_EQ(dir().RenameNoReplace("x", dir(), taken).kind(),
                ErrorKind::kConflict);
    }
    EXPECT_TRUE(dir().RenameNoReplace("x", dir(), "z").ok());
    EXPECT_EQ(*dir().List(), (Names{"b", "c", "y", "z"}));
    for (const char* name : {"b", "c", "y", "z"}) {
      EXPECT_TRUE(dir().RemoveTree(name).ok());
    }
  }
}

#ifdef TORCH_CKPT_FAULTS
// sshfs makes EPERM of whatever its server refuses, a file that is there too.
TEST_F(DirectoryTest, APermissionThatIsNotMeant) {
  ASSERT_TRUE(dir().WriteFile("there", "1").ok());
  SetFaultHook([](const FaultSite& site) -> FaultAction {
    return {.sys_errno = std::string(site.op) == "openat" ? EPERM : 0};
  });
  const Status there = dir().WriteFile("there", "2");
  const Status absent = dir().WriteFile("absent", "2");
  SetFaultHook(nullptr);
  EXPECT_EQ(there.sys_errno(), EEXIST);
  EXPECT_EQ(absent.sys_errno(), EPERM);
}
#endif

TEST_F(DirectoryTest, RemoveTreeFollowsNoLink) {
  ASSERT_TRUE(dir().MakeDirectory("kept").ok());
  ASSERT_TRUE(dir().OpenDirectory("kept")->WriteFile("file", "").ok());
  ASSERT_TRUE(Directory::CreateAll(path() + "/x/y/z").ok());
  ASSERT_TRUE(dir().OpenDirectory("x")->WriteFile("file", "").ok());
  std::filesystem::create_directory_symlink(path() + "/kept",
                                            path() + "/x/y/link");
  EXPECT_TRUE(dir().RemoveTree("x").ok());
  EXPECT_TRUE(dir().RemoveTree("x").ok()) << "it is gone already";
  EXPECT_EQ(*dir().List(), Names{"kept"});
  EXPECT_EQ(*dir().OpenDirectory("kept")->List(), Names{"file"});
}

TEST_F(DirectoryTest, SaysWhatCannotBeReplaced) {
  ASSERT_TRUE(dir().WriteFile("file", "").ok());
  ASSERT_TRUE(dir().MakeDirectory("directory").ok());
  EXPECT_TRUE(dir().CheckReplaceable("file").ok());
  EXPECT_TRUE(dir().CheckReplaceable("none").ok());
  const Status status = dir().CheckReplaceable("directory");
  EXPECT_EQ(status.kind(), ErrorKind::kConflict);
  EXPECT_EQ(status.file(), path() + "/directory");
}

TEST_F(DirectoryTest, CreatesParents) {
  const std::string deep = path() + "/x/y/z";
  EXPECT_EQ(Directory::Create(deep).sys_errno(), ENOENT);
  EXPECT_TRUE(Directory::CreateAll(deep + "/").ok());
  EXPECT_TRUE(Directory::CreateAll(deep).ok());
  EXPECT_TRUE(Directory::Create(deep).ok());
  EXPECT_TRUE(Directory::Open(deep).ok());
  std::filesystem::create_directory_symlink(deep, path() + "/link");
  EXPECT_TRUE(Directory::Create(path() + "/link").ok());
  ASSERT_TRUE(dir().WriteFile("file", "").ok());
  EXPECT_EQ(Directory::Create(path() + "/file").sys_errno(), ENOTDIR);
  EXPECT_EQ(Directory::CreateAll(path() + "/file/x").sys_errno(), ENOTDIR);
  EXPECT_EQ(dir().MakeDirectory("x").sys_errno(), EEXIST);
}

TEST(Paths, AreTakenApartWithoutLinks) {
  EXPECT_EQ(*AbsolutePath("/a/./b//c/"), "/a/b/c");
  EXPECT_EQ(*AbsolutePath("/"), "/");
  EXPECT_EQ(*AbsolutePath("//."), "/");
  EXPECT_EQ(*AbsolutePath("/a/../b"), "/a/../b") << "a may be a link";
  EXPECT_EQ(*AbsolutePath("x"),
            std::filesystem::current_path().string() + "/x");
  EXPECT_EQ(*AbsolutePath("/usr/.."), "/");
  EXPECT_EQ(AbsolutePath("").status().kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(ParentPath("/a/b"), "/a");
  EXPECT_EQ(ParentPath("/a"), "/");
  EXPECT_EQ(ParentPath("/"), "/");
  EXPECT_EQ(BaseName("/a/b"), "b");
  EXPECT_EQ(BaseName("/"), "");
}

#ifdef TORCH_CKPT_FAULTS

TEST_F(DirectoryTest, AFailedWriteLeavesNoFile) {
  for (const std::string op : {"pwrite", "fsync", "close"}) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EIO : 0};
    });
    const Status status = dir().WriteFile("a", "text");
    SetFaultHook(nullptr);
    EXPECT_EQ(status.sys_errno(), EIO) << op;
    EXPECT_TRUE(dir().List()->empty()) << op;
  }
}

TEST_F(DirectoryTest, EachFailureComesOutWithItsErrno) {
  ASSERT_TRUE(dir().WriteFile("a", "1").ok());
  const auto with = [&](const std::string& op, auto fn) {
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      return {.sys_errno = site.op == op ? EIO : 0};
    });
    const Status status = fn();
    SetFaultHook(nullptr);
    EXPECT_EQ(status.sys_errno(), EIO) << op;
    EXPECT_FALSE(status.file().empty()) << op;
  };
  with("openat", [&] { return dir().OpenFile("a", {}).status(); });
  with("fcntl", [&] { return dir().OpenFile("a", {}).status(); });
  with("openat", [&] { return dir().OpenDirectory("a").status(); });
  with("openat", [&] { return Directory::Open(path()).status(); });
  with("openat", [&] { return dir().List().status(); });
  with("getdents", [&] { return dir().List().status(); });
  with("mkdirat", [&] { return dir().MakeDirectory("x"); });
  with("mkdirat", [&] { return Directory::CreateAll(path() + "/x"); });
  with("fstatat", [&] { return dir().StatName("a").status(); });
  with("unlinkat", [&] { return dir().Unlink("a", true); });
  with("rmdir", [&] { return dir().RemoveDirectory("a", true); });
  with("renameat", [&] { return dir().Rename("a", dir(), "b"); });
  with("renameat2", [&] { return dir().RenameNoReplace("a", dir(), "b"); });
  with("fsync", [&] { return dir().Sync(); });
  EXPECT_EQ(*dir().List(), Names{"a"});
}

#endif  // TORCH_CKPT_FAULTS

}  // namespace
}  // namespace torch_ckpt
