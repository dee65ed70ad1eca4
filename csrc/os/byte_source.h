// Bytes to be read: the door between jobs and storage.
//
// A job says which bytes it wants, and what it knows of others who want them.
// Whether they come from the page cache or past it, with which alignment, and
// what happens where the file system refuses that, is decided here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "os/directory.h"
#include "os/transfer_file.h"

namespace torch_ckpt {

// Who reads these bytes about now.
enum class Readers {
  kThisProcess,  // they may go past the page cache, which costs far more CPU
  kSeveral,      // of this machine: the first one leaves them in the cache
};

// All functions may be called from any thread.
class ByteSource {
 public:
  // What Read wants of memory beside the bytes that it reads.
  static constexpr uint64_t kSlack = 2 * internal::kMaxDirectUnit;

  // Of a file that is open for reading and has `size` bytes. Without
  // `direct_io` all bytes come through the page cache.
  ByteSource(File file, uint64_t size, bool direct_io)
      : file_(std::move(file), /*writable=*/false, direct_io), size_(size) {}

  const std::string& path() const { return file_.path(); }
  uint64_t size() const { return size_; }

  // Bytes that are in memory, from `offset` on: up to out.size(), and 0 where
  // there are none or nobody knows. Never waits for the disk. While the last
  // call has missed it asks first whether the range is there: a miss costs a
  // readahead of bytes that are about to be read past the cache. Where the
  // kernel does not say, the next calls after a miss answer 0 without looking.
  Result<uint64_t> ReadCached(MutableByteSpan out, uint64_t offset) const;
  // Reads [lo, hi) into `scratch` and returns where byte `lo` stands in it.
  // From the page cache what is there, and the rest by whichever way is better.
  // kCorrupt where the file ends before. REQUIRES: scratch is aligned to
  // kSlack / 2 and holds [lo, hi) rounded out to multiples of that.
  Result<const std::byte*> Read(uint64_t lo, uint64_t hi,
                                MutableByteSpan scratch,
                                Readers readers = Readers::kThisProcess) const;

  // Has the kernel fetch [lo, hi), which several readers are about to read in
  // pieces: they wait for each piece and not for the disk between two of them.
  void ReadAhead(uint64_t lo, uint64_t hi) const {
    file_.file().ReadAhead(lo, hi - lo);
  }

  // fn(const File&), for who reads a few bytes here and there, with a
  // descriptor that goes through the page cache.
  template <class Fn>
  auto ThroughCache(const Fn& fn) const {
    return file_.Cached(fn);
  }

  // Descriptors that sources and sinks of this process hold.
  static uint64_t OpenDescriptors() {
    return internal::TransferFile::OpenDescriptors();
  }

 private:
  internal::TransferFile file_;
  const uint64_t size_;
  mutable std::atomic<bool> missed_{true};
  mutable std::atomic<bool> used_cache_{false};
  mutable std::atomic<int> skip_{0};  // calls left to answer 0 unlooked
};

// A range of a source, one step after the other: what the page cache has in
// steps that a core's second cache holds, and from where it gives out on all
// the rest in one read. For one thread.
class StepReader {
 public:
  // The range ends at `end`. `scratch` is as ByteSource::Read wants it for all
  // that is fetched, and what Next returns is there until it is called again.
  StepReader(const ByteSource& source, uint64_t end, MutableByteSpan scratch,
             Readers readers = Readers::kThisProcess)
      : source_(source), end_(end), scratch_(scratch), readers_(readers) {}

  // Bytes [at, at + size), which follow those of the last call. Null where the
  // page cache gives out: FetchRest has to be called first. Until then nothing
  // behind the first size + kSlack bytes of the scratch is touched. Errors as
  // Read.
  Result<const std::byte*> Next(uint64_t at, uint64_t size);
  // Reads [at, end). Errors as Read.
  Status FetchRest(uint64_t at);

 private:
  const ByteSource& source_;
  const uint64_t end_;
  const MutableByteSpan scratch_;
  const Readers readers_;
  const std::byte* rest_ = nullptr;  // from `rest_at_` to the end
  uint64_t rest_at_ = 0;
};

}  // namespace torch_ckpt
