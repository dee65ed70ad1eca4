// A directory that is there for one test and gone afterwards.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "os/directory.h"
#include "os/fault.h"

namespace torch_ckpt {

// Writes the file's pages back and drops them, where the file system heeds it.
inline void DropCache(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0) << path;
  EXPECT_EQ(fsync(fd), 0);
  EXPECT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  close(fd);
}

class TemporaryDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (std::filesystem::temp_directory_path() / "torch_ckpt-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
    auto directory = Directory::Open(path_);
    ASSERT_TRUE(directory.ok()) << directory.status().ToString();
    directory_ = std::move(directory).value();
  }
  void TearDown() override {
#ifdef TORCH_CKPT_FAULTS
    SetFaultHook(nullptr);
#endif
    std::error_code ignored;  // a leftover in the temporary directory
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  const Directory& dir() const { return directory_; }

 private:
  std::string path_;
  Directory directory_;
};

}  // namespace torch_ckpt
