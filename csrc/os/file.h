// Files. Every system call on a file goes through here: EINTR is retried,
// short counts are continued, a write of 0 bytes is ENOSPC, and every error
// names operation and path. A failed fsync is never retried.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

struct FileInfo {
  uint64_t bytes = 0;
  uint64_t device = 0, inode = 0;
  int64_t modified_ns = 0;  // since 1970, as the file system's clock says
  bool is_directory = false, is_regular = false, is_link = false;

  // Whatever the names are that led to them.
  bool SameFile(const FileInfo& o) const {
    return device == o.device && inode == o.inode;
  }
};

// An open file descriptor and the path it was opened by. Movable, not copyable.
// The const members may be called from several threads at once. The destructor
// closes without a check: call Close() where a write must be known to be good.
class File {
 public:
  File() = default;
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  File(File&& o) noexcept;
  File& operator=(File&& o) noexcept;
  ~File();

  bool valid() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  Result<FileInfo> Stat() const;
  // Up to out.size() bytes, fewer only where the file ends; how many.
  Result<uint64_t> Read(MutableByteSpan out, uint64_t offset) const;
  // Exactly out.size() bytes; the end of the file before that is kCorrupt
  // ("file ends at byte N").
  Status ReadExact(MutableByteSpan out, uint64_t offset) const;
  // Whether the page cache holds all of a range, without touching it: a hint,
  // since pages come and go. Nothing where the kernel does not say (cachestat
  // is of Linux 6.5, and for files that the caller might write). A file system
  // that keeps the pages under another file (overlayfs) says false.
  std::optional<bool> IsCached(uint64_t offset, uint64_t bytes) const;
  // Up to out.size() bytes that the page cache holds (RWF_NOWAIT); 0 when it
  // holds none or the file system cannot tell. Never waits for the disk, but
  // at a page that is missing the kernel starts a readahead.
  Result<uint64_t> ReadCached(MutableByteSpan out, uint64_t offset) const;
  // Has the kernel fetch a range into the page cache, and does not wait for it:
  // a hint that may do nothing.
  void ReadAhead(uint64_t offset, uint64_t bytes) const;
  // Has the kernel forget what it holds of the file in the page cache, but for
  // pages that are not on the disk yet: a hint that may do nothing.
  void DropCached() const;
  Status WriteAll(ByteSpan data, uint64_t offset) const;
  // Reserves blocks so that ENOSPC comes now. True when the file system did
  // it, false when it cannot (that is no error).
  Result<bool> Allocate(uint64_t bytes) const;
  Status Truncate(uint64_t bytes) const;
  Status Sync() const;  // fsync
  Status Close();

 private:
  int fd_ = -1;
  std::string path_;
};

}  // namespace torch_ckpt
