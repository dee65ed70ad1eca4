// Files being written into a staging directory, piece by piece.
//
// A file is cut at multiples of kPieceBytes from its start; each piece is
// filled in memory, digested and written by one thread, in any order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/written_ranges.h"
#include "format/manifest.h"
#include "os/byte_sink.h"
#include "os/directory.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

inline constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
// Several writers of one file divide it at multiples of this: no two of them
// write into one block of a file system.
inline constexpr uint64_t kWriterBlock = 4096;
static_assert(kPieceBytes % kSegmentBytes == 0);
static_assert(kSegmentBytes % kDigestStep == 0);

struct OutputSpec {
  std::string name;    // final name
  std::string staged;  // name in staging
  std::string id;      // empty for files that carry none
  FileRole role = FileRole::kData;
  uint64_t bytes = 0;
  // What a call writes of a file that CreateOutputs has made: ascending, apart,
  // cut at multiples of kWriterBlock or at the end of the file. Without: the
  // call creates the file and writes all of it.
  std::optional<std::vector<ByteRange>> ranges;
};

struct OutputOptions {
  int workers = 2;
  bool sync = true;       // fsync before a file counts as written
  bool direct_io = true;  // large files past the page cache, where that goes
  // What one call of the fill function is asked for at most: a step keeps
  // gathered bytes in the cache for the digest, a piece makes for longer reads.
  uint64_t fill_bytes = kDigestStep;
  // Memory that the fill function wants for itself, beside the piece.
  uint64_t scratch_bytes = 0;
  // Called, from several threads at once, before a worker leases memory for a
  // piece: what may have to wait for others waits here.
  std::function<Status(size_t file, uint64_t begin)> before_piece;
  // Page-locks the memory that is filled, where a device fills it.
  PageLocker* page_locker = nullptr;
};

// What can be written of [begin, end) of a file without touching a block that
// others write into; empty where begin >= end.
ByteRange Interior(const ByteRange& range, uint64_t file_bytes);

// Calls fn(begin, end) for the pieces that a range is written in.
template <class Fn>
void ForEachPiece(const ByteRange& range, const Fn& fn) {
  for (uint64_t at = range.begin; at < range.end;) {
    const uint64_t end =
        std::min(range.end, at / kPieceBytes * kPieceBytes + kPieceBytes);
    fn(at, end);
    at = end;
  }
}

// Leaves of what is to be written of `files` (their ranges, or all of them)
// what writer `part` of `parts` writes, each about as many bytes.
void TakePart(std::vector<OutputSpec>* files, int part, int parts);

// Carries the digests of a file's segments along with its bytes, which come in
// their order. For one thread.
class SegmentDigester {
 public:
  // The bytes begin at `offset` of the file. `digests` are those of the
  // segments from the one there on: of what was written of each before this, 0
  // if nothing was.
  SegmentDigester(uint32_t* digests, uint64_t offset)
      : digests_(digests),
        first_segment_(offset / kSegmentBytes),
        offset_(offset) {}

  uint64_t offset() const { return offset_; }  // of the next byte
  // Bytes that are where they belong.
  void Add(ByteSpan bytes);
  // The next `bytes` bytes, which are where they belong and have `crc` by
  // themselves. REQUIRES: they lie in one segment.
  void Add(uint32_t crc, size_t bytes);
  // Copies the bytes to `to` on the way: one pass over memory.
  void Copy(std::byte* to, ByteSpan bytes);

 private:
  // Calls step(digest, at, size) for the part in each segment.
  template <class Step>
  void EachSegment(size_t size, const Step& step);

  uint32_t* digests_;
  uint64_t first_segment_;
  uint64_t offset_;
};

// Fills `out` with the bytes of file `file` from the digester's offset on, and
// gives all of them to the digester. Called from several threads at once, for
// disjoint ranges inside one piece. `scratch` has the options' scratch_bytes,
// aligned to 4096.
using FillFn = std::function<Status(size_t file, MutableByteSpan out,
                                    MutableByteSpan scratch, int worker,
                                    SegmentDigester* digester)>;

// Where `bytes` bytes of file `file` from `begin` on already are, in memory
// that stays as it is until the job is done: a few stretches, each of a
// multiple of 4096 bytes and beginning at one. Empty where there are none such.
// Called from several threads at once.
using PlaceFn = std::function<std::vector<ByteSpan>(size_t file, uint64_t begin,
                                                    uint64_t bytes)>;

// Creates `files` in staging, or opens those that have ranges; fills, writes
// and syncs what is to be written of each. Memory: a piece and the scratch a
// worker, leased for one piece at a time so that more workers than the budget
// holds just wait; none for pieces that `place` knows, which are written from
// there. Returns what was written of each file, with digests; of a file
// that was created, one range. After an error the files that this call created
// are unlinked.
Result<std::vector<std::vector<WrittenRange>>> WriteOutputs(
    const Directory& staging, const std::vector<OutputSpec>& files,
    const OutputOptions& options, Job* job, const FillFn& fill,
    const PlaceFn& place = {});

// Creates the files at full size (blocks reserved) without writing them.
Status CreateOutputs(const Directory& staging,
                     const std::vector<OutputSpec>& files);

}  // namespace torch_ckpt
