#include "os/transfer_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <string>

#include "base/checked.h"
#include "os/call.h"
#include "os/probe.h"

namespace torch_ckpt::internal {
namespace {

// Smaller units gain nothing, and the page cache is made of pages.
constexpr uint64_t kMinDirectUnit = 4096;

Status SetDirect(const File& file, bool on) {
  constexpr const char* kOp = "fcntl(O_DIRECT)";
  const int flags =
      SystemCall(kOp, file.path(), [&] { return fcntl(file.fd(), F_GETFL); });
  if (flags < 0) return Status::Io(errno, kOp, file.path());
  const int wanted = on ? flags | O_DIRECT : flags & ~O_DIRECT;
  if (SystemCall(kOp, file.path(),
                 [&] { return fcntl(file.fd(), F_SETFL, wanted); }) < 0) {
    return Status::Io(errno, kOp, file.path());
  }
  return {};
}

// Moves `size` bytes in units by call(at, count), which returns what pread and
// pwrite do, until `needed` are done. A count that ends inside a unit is taken
// back to its start; one that gets nowhere counts as a refusal.
template <class Call>
Result<DirectMoved> MoveDirect(const char* op, const std::string& path,
                               uint64_t size, uint64_t needed, uint64_t offset,
                               uint64_t unit, const Call& call) {
  uint64_t done = 0;
  while (done < needed) {
    const uint64_t want = std::min(size - done, kMaxTransfer);
    const ssize_t moved = call(done, static_cast<size_t>(want));
    if (moved < 0) {
      if (LacksCall(errno)) return DirectMoved{done, true};
      return Status::Io(errno,
                        std::string(op) + " of " + std::to_string(want) +
                            " bytes at byte " + std::to_string(offset + done),
                        path);
    }
    if (moved == 0) return DirectMoved{done, false};
    const uint64_t until = done + static_cast<uint64_t>(moved);
    if (until >= needed) return DirectMoved{needed, false};
    if (RoundDown(until, unit) == done) return DirectMoved{done, true};
    done = RoundDown(until, unit);
  }
  return DirectMoved{done, false};
}

}  // namespace

std::atomic<uint64_t> TransferFile::descriptors_{0};

TransferFile::~TransferFile() {
  descriptors_ -= (file_.valid() ? 1u : 0u) + (second_.valid() ? 1u : 0u);
}

Result<File> TransferFile::OpenAgain() const {
  const std::string link = "/proc/self/fd/" + std::to_string(file_.fd());
  const int flags =
      (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  const int fd = SystemCall(
      "openat", path(), [&] { return openat(AT_FDCWD, link.c_str(), flags); });
  if (fd < 0) return Status::Io(errno, "openat", path());
  ++descriptors_;
  return File(fd, path());
}

// Whatever fails here fails for the transfer through the cache too, which then
// says so; else only speed is lost.
uint64_t TransferFile::DirectUnit(const std::byte* memory,
                                  bool keep_cached) const {
  if (refused_) return 0;
  std::lock_guard<std::mutex> lock(setup_);
  if (refused_) return 0;
  if (!probed_) {
    const Result<DirectIo> probed = ProbeDirectIo(file_);
    probed_ = true;
    if (probed.ok() && probed->supported) {
      unit_ = std::max<uint64_t>(probed->offset_alignment, kMinDirectUnit);
      memory_unit_ = probed->memory_alignment;
    }
    refused_ = unit_ == 0 || std::max(unit_, memory_unit_) > kMaxDirectUnit;
    if (refused_) return 0;
  }
  if (reinterpret_cast<uintptr_t>(memory) % memory_unit_ != 0) return 0;
  if (direct_ != nullptr) return unit_;
  if (!keep_cached) {
    // Nobody may be using it through the cache, nor begin to.
    std::unique_lock<std::shared_mutex> alone(cached_use_, std::try_to_lock);
    if (alone) {
      if (SetDirect(file_, true).ok()) {
        first_is_direct_ = true;
        direct_ = &file_;
      } else {
        refused_ = true;
      }
      return refused_ ? 0 : unit_;
    }
  }
  Result<File> again = OpenAgain();
  if (again.ok()) {
    second_ = std::move(again).value();
    if (SetDirect(second_, true).ok()) direct_ = &second_;
  }
  refused_ = direct_ == nullptr;
  return refused_ ? 0 : unit_;
}

Result<const File*> TransferFile::CachedFile() const {
  std::lock_guard<std::mutex> lock(setup_);
  if (first_is_direct_ && !second_.valid()) {
    Result<File> again = OpenAgain();
    if (again.ok()) {
      second_ = std::move(again).value();
    } else {
      TC_RETURN_IF_ERROR(GiveUpLocked());
    }
  }
  return first_is_direct_ ? &second_ : &file_;
}

Status TransferFile::GiveUpLocked() const {
  refused_ = true;
  if (!first_is_direct_) return {};
  TC_RETURN_IF_ERROR(SetDirect(file_, false));
  first_is_direct_ = false;
  return {};
}

Status TransferFile::GiveUp() const {
  std::lock_guard<std::mutex> lock(setup_);
  return GiveUpLocked();
}

Result<DirectMoved> TransferFile::ReadDirect(MutableByteSpan out,
                                             uint64_t offset,
                                             uint64_t needed) const {
  TC_ASSIGN_OR_RETURN(
      DirectMoved moved,
      MoveDirect("pread", path(), out.size(), needed, offset, unit_,
                 [&](uint64_t at, size_t size) {
                   return TransferCall(
                       "pread", path(),
                       {out.data() + at, size, offset + at, true},
                       [&](size_t count) {
                         return pread(direct_->fd(), out.data() + at, count,
                                      static_cast<off_t>(offset + at));
                       });
                 }));
  if (moved.bytes < needed && !moved.refused) {
    return Corrupt("file ends at byte " + std::to_string(offset + moved.bytes) +
                   ", " + std::to_string(needed - moved.bytes) +
                   " more are needed")
        .WithFile(path());
  }
  if (moved.refused) TC_RETURN_IF_ERROR(GiveUp());
  return moved;
}

Result<DirectMoved> TransferFile::WriteDirect(ByteSpan data,
                                              uint64_t offset) const {
  TC_ASSIGN_OR_RETURN(
      DirectMoved moved,
      MoveDirect("pwrite", path(), data.size(), data.size(), offset, unit_,
                 [&](uint64_t at, size_t size) {
                   return TransferCall(
                       "pwrite", path(),
                       {data.data() + at, size, offset + at, true},
                       [&](size_t count) {
                         return pwrite(direct_->fd(), data.data() + at, count,
                                       static_cast<off_t>(offset + at));
                       });
                 }));
  if (moved.bytes < data.size() && !moved.refused) {
    return Status::Io(ENOSPC,
                      "pwrite at byte " + std::to_string(offset + moved.bytes),
                      path());
  }
  if (moved.refused) TC_RETURN_IF_ERROR(GiveUp());
  return moved;
}

Status TransferFile::Close() {
  descriptors_ -= (file_.valid() ? 1u : 0u) + (second_.valid() ? 1u : 0u);
  direct_ = nullptr;
  Status second = second_.Close();
  Status first = file_.Close();
  return first.ok() ? std::move(second) : first;
}

}  // namespace torch_ckpt::internal
