// One file, and the choice between the page cache and direct I/O for it.
// For ByteSource and ByteSink, which say when each is better; here stands what
// the file system takes.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "base/bytes.h"
#include "base/status.h"
#include "os/file.h"

namespace torch_ckpt::internal {

// Larger units than this are not served past the cache.
inline constexpr uint64_t kMaxDirectUnit = uint64_t{64} << 10;

// What of a direct transfer was done. After a refusal the rest, and all else,
// goes through the cache.
struct DirectMoved {
  uint64_t bytes = 0;
  bool refused = false;
};

// All functions may be called from any thread.
//
// The flag O_DIRECT belongs to an open descriptor and so to all of its users:
// it is set while nobody uses the descriptor through the cache. Whoever needs
// the other way then gets a second descriptor, opened by the first one and not
// by name: it is the same file, whatever has become of the name. Taking the
// flag away is harmless at any time, since aligned transfers suit the cache
// too.
class TransferFile {
 public:
  // `direct`: whether transfers may go past the cache at all.
  TransferFile(File file, bool writable, bool direct)
      : file_(std::move(file)), writable_(writable), refused_(!direct) {
    ++descriptors_;
  }
  TransferFile(const TransferFile&) = delete;
  TransferFile& operator=(const TransferFile&) = delete;
  ~TransferFile();

  const std::string& path() const { return file_.path(); }
  // For calls that the flag does not matter to.
  const File& file() const { return file_; }

  // Offsets and lengths of direct transfers must be multiples of it; 0 where
  // the file system takes none, or the memory is not aligned as it has to be.
  // `keep_cached`: transfers through the cache are to be expected as well.
  uint64_t DirectUnit(const std::byte* memory, bool keep_cached) const;
  // REQUIRES: all in multiples of DirectUnit(), which was not 0. Reads
  // `needed` bytes, and more up to out.size() where the file has them; kCorrupt
  // when it ends before.
  Result<DirectMoved> ReadDirect(MutableByteSpan out, uint64_t offset,
                                 uint64_t needed) const;
  Result<DirectMoved> WriteDirect(ByteSpan data, uint64_t offset) const;

  // fn(const File&) with a descriptor that goes through the cache.
  template <class Fn>
  auto Cached(const Fn& fn) const -> decltype(fn(std::declval<File&>())) {
    {
      std::shared_lock<std::shared_mutex> lock(cached_use_);
      if (!first_is_direct_) return fn(file_);
    }
    TC_ASSIGN_OR_RETURN(const File* file, CachedFile());
    return fn(*file);
  }

  // Ends direct I/O on this file for good.
  Status GiveUp() const;
  // REQUIRES: nobody uses the file any more.
  Status Close();

  // Of all files of the process, by now.
  static uint64_t OpenDescriptors() { return descriptors_; }

 private:
  Result<const File*> CachedFile() const;
  Status GiveUpLocked() const;
  Result<File> OpenAgain() const;

  static std::atomic<uint64_t> descriptors_;

  File file_;
  const bool writable_;
  mutable std::shared_mutex cached_use_;  // of file_
  mutable std::atomic<bool> first_is_direct_{false};
  mutable std::atomic<bool> refused_;
  mutable std::mutex setup_;  // guards what follows
  mutable bool probed_ = false;
  mutable uint64_t unit_ = 0, memory_unit_ = 0;
  mutable File second_;
  mutable const File* direct_ = nullptr;  // &file_ or &second_
};

}  // namespace torch_ckpt::internal
