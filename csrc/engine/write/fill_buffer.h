// The memory that providers fill, and the digests of what they put there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"

namespace torch_ckpt {

// Carries the digests of a file's segments along with its bytes, which come in
// their order. For one thread.
class SegmentDigester {
 public:
  // The bytes begin at `offset` of the file. `digests` are those of the
  // segments from the one there on: of what was written of each before this, 0
  // if nothing was.
  SegmentDigester(uint32_t* digests, uint64_t offset);

  uint64_t offset() const { return offset_; }  // of the next byte
  void Add(ByteSpan bytes);
  // The next `bytes` bytes, which have `crc` by themselves. REQUIRES: they lie
  // in one segment.
  void Add(uint32_t crc, uint64_t bytes);

 private:
  uint32_t* digests_;
  uint64_t first_segment_;
  uint64_t offset_;
};

// A part of an output while it is filled. For one thread.
class FillBuffer {
 public:
  enum class Copies {
    kCached,    // for who reads them next
    kStreamed,  // past the CPU's caches
    kDigested,  // streamed, and digested on the way
  };

  // `out` is to hold the bytes of the output from `offset` on. `worker` counts
  // from 0 among all who fill at once.
  FillBuffer(MutableByteSpan out, uint64_t offset, int worker, Copies copies)
      : out_(out), offset_(offset), worker_(worker), copies_(copies) {}

  int worker() const { return worker_; }
  uint64_t offset() const { return offset_; }
  size_t size() const { return out_.size(); }
  MutableByteSpan Out(uint64_t at, uint64_t bytes) const {
    return out_.subspan(at, bytes);
  }

  // Providers say how many bytes they have put there, or have begun to: who
  // asked compares it with what they were asked for. What Copy has copied is
  // counted already.
  void Filled(uint64_t bytes) { filled_ += bytes; }
  uint64_t filled() const { return filled_; }

  // Copies bytes to `at`.
  void Copy(uint64_t at, ByteSpan bytes);
  // Says that these bytes are there and still in the cache, which spares a
  // second pass for their digest. Nobody need say so.
  void Made(uint64_t at, uint64_t bytes);
  // The same of bytes of one segment of the output whose CRC-32C is known.
  void Made(uint64_t at, uint64_t bytes, uint32_t crc32c);

  // Gives all bytes of the buffer to `digester`, which is at its offset.
  void Digest(SegmentDigester* digester);

 private:
  // Bytes whose digest is known; they lie in one segment.
  struct Digested {
    uint64_t at, bytes;
    uint32_t crc;
  };
  // Where the segment of the output that `at` is in ends, in this buffer.
  uint64_t SegmentEnd(uint64_t at) const;
  // Calls step(crc, at, bytes) -> crc for the part of a range in each segment,
  // if it goes on where the last one ended or is worth a digest by itself;
  // else does nothing and returns false.
  template <class Step>
  bool Extend(uint64_t at, uint64_t bytes, const Step& step);

  const MutableByteSpan out_;
  const uint64_t offset_;
  const int worker_;
  const Copies copies_;
  std::vector<Digested> digested_;
  uint64_t filled_ = 0;
};

}  // namespace torch_ckpt
