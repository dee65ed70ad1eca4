#include "os/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "base/checked.h"
#include "os/allocate.h"
#include "os/call.h"

namespace torch_ckpt {
namespace {

using internal::kMaxTransfer;
using internal::LacksCall;
using internal::SystemCall;
using internal::TransferCall;

std::string At(const char* op, size_t bytes, uint64_t offset) {
  return std::string(op) + " of " + std::to_string(bytes) + " bytes at byte " +
         std::to_string(offset);
}

// The offset as the kernel takes it, or why it does not fit.
Status CheckRange(uint64_t offset, uint64_t bytes, const std::string& path) {
  constexpr auto kMax =
      static_cast<uint64_t>(std::numeric_limits<off_t>::max());
  const auto end = CheckedAdd(offset, bytes);
  if (end && *end <= kMax) return {};
  return InvalidArgument("bytes " + std::to_string(offset) + " + " +
                         std::to_string(bytes) + " are beyond any file")
      .WithFile(path);
}

off_t ToOffset(uint64_t checked) { return static_cast<off_t>(checked); }

// A close(2) that fails has closed the descriptor all the same, so it is made
// under a fault too, and never twice.
int CloseDescriptor(int fd, const std::string& path) {
  const FaultAction fault = FaultPoint("close", path);
  const int error = close(fd) == 0 ? 0 : errno;
  return fault.sys_errno != 0 ? fault.sys_errno : error;
}

}  // namespace

File::File(File&& o) noexcept
    : fd_(std::exchange(o.fd_, -1)), path_(std::move(o.path_)) {}

File& File::operator=(File&& o) noexcept {
  if (this != &o) {
    if (fd_ >= 0) CloseDescriptor(fd_, path_);
    fd_ = std::exchange(o.fd_, -1);
    path_ = std::move(o.path_);
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) CloseDescriptor(fd_, path_);
}

Result<FileInfo> File::Stat() const {
  struct stat st;
  if (SystemCall("fstat", path_, [&] { return fstat(fd_, &st); }) < 0) {
    return Status::Io(errno, "fstat", path_);
  }
  return internal::ToFileInfo(st);
}

Result<uint64_t> File::Read(MutableByteSpan out, uint64_t offset) const {
  TC_RETURN_IF_ERROR(CheckRange(offset, out.size(), path_));
  uint64_t done = 0;
  while (done < out.size()) {
    const MutableByteSpan rest =
        out.subspan(done, std::min(out.size() - done, kMaxTransfer));
    const uint64_t at = offset + done;
    const ssize_t got = TransferCall(
        "pread", path_, {rest.data(), rest.size(), at}, [&](size_t count) {
          return pread(fd_, rest.data(), count, ToOffset(at));
        });
    if (got < 0) return Status::Io(errno, At("pread", rest.size(), at), path_);
    if (got == 0) break;
    done += static_cast<uint64_t>(got);
  }
  return done;
}

Status File::ReadExact(MutableByteSpan out, uint64_t offset) const {
  TC_ASSIGN_OR_RETURN(const uint64_t got, Read(out, offset));
  if (got == out.size()) return {};
  return Corrupt("file ends at byte " + std::to_string(offset + got) + ", " +
                 std::to_string(out.size() - got) + " more are needed")
      .WithFile(path_);
}

std::optional<bool> File::IsCached(uint64_t offset, uint64_t bytes) const {
  // The headers that we build with may be older than the kernel that runs.
#ifdef SYS_cachestat
  constexpr long kCall = SYS_cachestat;
#else
  constexpr long kCall = 451;  // on x86-64 and arm64
#endif
  static const auto kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0) return true;
  const struct {
    uint64_t offset, length;
  } range = {offset, bytes};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } found = {};
  const auto done = SystemCall("cachestat", path_, [&] {
    return syscall(kCall, fd_, &range, &found, 0u);
  });
  if (done != 0) return std::nullopt;
  const uint64_t pages = (offset + bytes - 1) / kPage - offset / kPage + 1;
  return found.cached >= pages;
}

Result<uint64_t> File::ReadCached(MutableByteSpan out, uint64_t offset) const {
  TC_RETURN_IF_ERROR(CheckRange(offset, out.size(), path_));
  uint64_t done = 0;
  while (!out.empty()) {
    const size_t want = std::min(out.size(), kMaxTransfer);
    const ssize_t got = TransferCall(
        "preadv2", path_, {out.data(), want, offset}, [&](size_t count) {
          const iovec target{out.data(), count};
          return preadv2(fd_, &target, 1, ToOffset(offset), RWF_NOWAIT);
        });
    if (got < 0) {
      // Not in the cache, or a file system or a sandbox without the flag.
      if (errno == EAGAIN || LacksCall(errno)) break;
      return Status::Io(errno, At("preadv2", want, offset), path_);
    }
    done += static_cast<uint64_t>(got);
    if (static_cast<size_t>(got) < want) break;
    out = out.subspan(want);
    offset += want;
  }
  return done;
}

void File::ReadAhead(uint64_t offset, uint64_t bytes) const {
  if (!CheckRange(offset, bytes, path_).ok()) return;
  // What goes wrong here goes wrong for the reads that follow, which say so.
  posix_fadvise(fd_, ToOffset(offset), ToOffset(bytes), POSIX_FADV_WILLNEED);
}

void File::DropCached() const { posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }

Status File::WriteAll(ByteSpan data, uint64_t offset) const {
  TC_RETURN_IF_ERROR(CheckRange(offset, data.size(), path_));
  while (!data.empty()) {
    const size_t want = std::min(data.size(), kMaxTransfer);
    const ssize_t put = TransferCall(
        "pwrite", path_, {data.data(), want, offset}, [&](size_t count) {
          return pwrite(fd_, data.data(), count, ToOffset(offset));
        });
    if (put < 0) return Status::Io(errno, At("pwrite", want, offset), path_);
    if (put == 0) return Status::Io(ENOSPC, At("pwrite", want, offset), path_);
    data = data.subspan(static_cast<size_t>(put));
    offset += static_cast<uint64_t>(put);
  }
  return {};
}

Result<bool> File::Allocate(uint64_t bytes) const {
  if (bytes == 0) return true;
  TC_RETURN_IF_ERROR(CheckRange(0, bytes, path_));
  // Not posix_fallocate: where the file system has no such call, that one
  // writes into every block, which is the whole save's I/O once more.
  if (internal::Allocate(fd_, 0, 0, bytes, path_) == 0) return true;
  // NFSv3, some FUSE; or it is cut off again and again. Not LacksCall: EINVAL
  // would be of the range, which is ours.
  if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINTR) return false;
  return Status::Io(errno, "fallocate of " + std::to_string(bytes) + " bytes",
                    path_);
}

Status File::Truncate(uint64_t bytes) const {
  TC_RETURN_IF_ERROR(CheckRange(0, bytes, path_));
  if (SystemCall("ftruncate", path_,
                 [&] { return ftruncate(fd_, ToOffset(bytes)); }) < 0) {
    return Status::Io(errno, "ftruncate to " + std::to_string(bytes) + " bytes",
                      path_);
  }
  return {};
}

// EINTR from fsync is a wait that was cut off, with no lost write reported, and
// is made again. After any other error the kernel may have dropped the dirty
// pages and would call a second fsync good: that one is final.
Status File::Sync() const {
  if (SystemCall("fsync", path_, [&] { return fsync(fd_); }) < 0) {
    return Status::Io(errno, "fsync", path_);
  }
  return {};
}

// NFS and some FUSE file systems report a failed write only here: whoever wrote
// must look, even after a good fsync.
Status File::Close() {
  if (fd_ < 0) return {};
  const int error = CloseDescriptor(std::exchange(fd_, -1), path_);
  // Interrupted: Linux has closed the descriptor all the same, and says so for
  // no lost write.
  if (error != 0 && error != EINTR) return Status::Io(error, "close", path_);
  return {};
}

}  // namespace torch_ckpt
