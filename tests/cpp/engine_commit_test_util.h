// What the tests of the commit share: a directory "c" that holds an old or a
// new tensor "a".
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "engine/commit/commit.h"
#include "engine_test_util.h"

namespace torch_ckpt {

// Whether all is to be tried of what is a sample otherwise: ./dev campaign.
inline bool Full() {
  const char* const full = std::getenv("TORCH_CKPT_FULL");
  return full != nullptr && std::string(full) != "" && std::string(full) != "0";
}

class CommitTest : public EngineTest {
 protected:
  std::vector<Piece> Pieces(const Array& a) {
    return GridPieces("a", a, {2, 1});
  }
  void ExpectHolds(const Array& a) {
    auto all = ReadAll(Path("c"));
    ASSERT_OK(all.status());
    EXPECT_EQ(all->at("a"), a.bytes);
  }
  void ExpectNoStaging() {
    for (const std::string& folder : {root(), Path("c")}) {
      for (const std::string& name : Names(folder)) {
        EXPECT_FALSE(name.ends_with(kStageSuffix)) << folder << "/" << name;
      }
    }
  }
  // What this process holds below `path` no longer keeps anybody off: as on two
  // nodes whose file system keeps locks to each node; `flocks` only, as NFS
  // does, or all.
  static void ReleaseLocks(const std::string& path, bool flocks_only) {
    namespace fs = std::filesystem;
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string name = fs::read_symlink(entry.path(), gone).string();
      if (gone || !name.starts_with(path)) continue;
      const int fd = std::stoi(entry.path().filename().string());
      flock(fd, LOCK_UN);
      if (flocks_only) continue;
      struct flock whole = {};
      whole.l_type = F_UNLCK;
      whole.l_whence = SEEK_SET;
      (void)fcntl(fd, F_OFD_SETLK, &whole);  // EINVAL for a directory
    }
  }
  const Array old_ = MakeArray(Dtype::kF32, {10, 4}, 1);
  const Array new_ = MakeArray(Dtype::kF32, {10, 4}, 2);
};

}  // namespace torch_ckpt
