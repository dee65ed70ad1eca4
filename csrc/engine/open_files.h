// The data files of a checkpoint while a job reads them.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/checkpoint.h"

namespace torch_ckpt {

// One data file, with a buffered and (on first need) a direct descriptor.
// All functions may be called from any thread.
class SourceFile {
 public:
  SourceFile(const Checkpoint* checkpoint, std::string name, File buffered)
      : checkpoint_(checkpoint),
        name_(std::move(name)),
        buffered_(std::move(buffered)) {}

  const std::string& path() const { return buffered_.path(); }
  // Bytes that the page cache holds at once, from `offset` on; see
  // File::ReadCached. While the last read has missed, asks first whether the
  // range is there: a miss costs a readahead of bytes that direct I/O is about
  // to read. Where the kernel does not say, the next reads after a miss answer
  // 0 without looking.
  Result<uint64_t> ReadCached(MutableByteSpan out, uint64_t offset) const;
  Status ReadBuffered(MutableByteSpan out, uint64_t offset) const {
    return buffered_.ReadExact(out, offset);
  }
  // Reads [lo, hi) into `scratch` and returns where byte `lo` stands in it.
  // From the page cache what is there; the rest, when it is large, past it
  // with direct I/O: the cache costs far more CPU than the disk.
  // REQUIRES: scratch is aligned to 4096 and holds hi - lo + 2 * 4096 bytes.
  Result<const std::byte*> Read(uint64_t lo, uint64_t hi,
                                MutableByteSpan scratch) const;

 private:
  // Null when the file system refuses direct I/O.
  Result<const File*> Direct() const;

  const Checkpoint* checkpoint_;
  const std::string name_;
  File buffered_;
  mutable std::atomic<bool> missed_{true};
  mutable std::atomic<int> skip_{0};  // reads left to answer 0 unlooked
  mutable std::mutex mutex_;
  mutable bool direct_tried_ = false;
  mutable File direct_;
};

// Opens files on demand and keeps at most `max_open` of them.
class OpenFiles {
 public:
  explicit OpenFiles(std::shared_ptr<const Checkpoint> checkpoint,
                     size_t max_open = 256)
      : checkpoint_(std::move(checkpoint)), max_open_(max_open) {}

  // By position in checkpoint->files(). The handle stays good while
  // it is held, whatever is closed here meanwhile. Thread-safe.
  Result<std::shared_ptr<const SourceFile>> Get(uint32_t file);

 private:
  using Entry = std::pair<uint32_t, std::shared_ptr<const SourceFile>>;
  const std::shared_ptr<const Checkpoint> checkpoint_;
  const size_t max_open_;
  std::mutex mutex_;
  std::list<Entry> recent_;  // most recently used first
  std::unordered_map<uint32_t, std::list<Entry>::iterator> by_file_;
};

}  // namespace torch_ckpt
