// Memory that other processes can map too, by the system's calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "base/stretches.h"
#include "os/file.h"

namespace torch_ckpt {

// A sparse memory file (memfd_create) and a range of addresses for it, of which
// stretches are mapped. The byte at an address is always the same byte of the
// file: neighbouring stretches are one in memory and in the file. The file can
// never shrink, or whoever maps it could meet SIGBUS. Methods may be called
// from any thread, but not in a forked child.
class SharedMemory {
 public:
  // kUnsupported, with the call that failed, where the system refuses such a
  // file, so many addresses, or to take pages back. Every stretch will begin at
  // a multiple of `alignment`. REQUIRES: that is a power of two, of pages.
  static Result<std::unique_ptr<SharedMemory>> Create(size_t alignment);
  ~SharedMemory();  // of stretches too; another process keeps what it has
                    // mapped
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // `bytes` with contents undefined, none of its pages present yet, kept out of
  // forked children. Huge pages are asked for. kExhausted when the system maps
  // no more, or no gap of the range is large enough. REQUIRES: a multiple of
  // the alignment, not 0.
  Result<std::byte*> Map(size_t bytes);
  // Makes any pages that Map has given present. kExhausted when the system
  // gives no memory; some are present then. Before anybody writes to them:
  // where there is no memory for a page of a file, the writer is killed.
  Status MakePresent(std::byte* data, size_t bytes);
  // Gives back any pages that Map has given, those of other processes that map
  // them too: these read zeros from now on. False where the system does not
  // take them; they are still there then.
  bool Unmap(std::byte* data, size_t bytes);

  int fd() const { return file_.fd(); }
  uint64_t OffsetOf(const std::byte* data) const {
    return static_cast<uint64_t>(data - base_);
  }

 private:
  SharedMemory(File file, std::byte* base, size_t size);
  void AddGap(std::byte* data, size_t bytes);

  const File file_;
  std::byte* const base_;
  const size_t size_;
  std::mutex mutex_;
  Stretches gaps_;  // of the range, where nothing is mapped
};

// Bytes of a memory file, as this machine tells files apart.
struct SharedRange {
  uint64_t device = 0, inode = 0, offset = 0;
  size_t bytes = 0;
  friend bool operator==(const SharedRange&, const SharedRange&) = default;
};

// A range of another process's SharedMemory. kInvalidArgument where `fd` is no
// such file, or ends before the range does.
Result<SharedRange> FindShared(int fd, uint64_t offset, size_t bytes);

// Maps a range that was found in `fd`, to read and to write; the caller unmaps
// it with UnmapMemory and may close `fd` before.
Result<std::byte*> MapShared(int fd, const SharedRange& range);

}  // namespace torch_ckpt
