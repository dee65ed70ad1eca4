// Files being written into a staging directory, piece by piece.
//
// A file is cut at multiples of kPieceBytes from its start; each piece is
// filled in memory, digested and written by one thread, in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/write/extents.h"
#include "engine/write/output_crcs.h"
#include "engine/write/staged_file.h"
#include "engine/write/written_ranges.h"
#include "os/directory.h"
#include "runtime/crc32c.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

inline constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
// Several writers of one file divide it at multiples of this: no two of them
// write into one block of a file system.
inline constexpr uint64_t kWriterBlock = 4096;
static_assert(kPieceBytes % kSegmentBytes == 0);
static_assert(kSegmentBytes % kDigestStep == 0);

// A file, and where its bytes come from: all those that are written.
struct Output {
  StagedFile file;
  ExtentList extents;
  // What a call writes of a file that CreateOutput has made: ascending, apart,
  // cut at multiples of kWriterBlock or at the end of the file. Without: the
  // call creates the file and writes all of it.
  std::optional<std::vector<ByteRange>> ranges{};
  // Gets the bytes that are written. Null: nobody wants more than the CRC-32Cs
  // of segments.
  OutputCrcs* crcs = nullptr;
};

struct OutputOptions {
  int workers = 2;
  bool sync = true;       // fsync before a file counts as written
  bool direct_io = true;  // large files past the page cache, where that goes
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

// Leaves of what is to be written of `outputs` (their ranges, or all of them)
// what writer `share` of `shares` writes, each about as many bytes.
void TakeShare(std::vector<Output>* outputs, int share, int shares);

// Creates the files in staging, or opens those that have ranges; fills, writes
// and syncs what is to be written of each, by workers that count from
// `first_worker`. Memory: a piece and the scratch of the providers a worker,
// leased for one piece at a time so that more workers than the budget holds
// just wait; none for pieces that lie in a snapshot already, aligned and in
// few stretches, which are written from there. Returns what was written of each
// file, with digests; of a file that was created, one range. After an error the
// files that this call created are unlinked.
Result<std::vector<std::vector<WrittenRange>>> WriteOutputs(
    const Directory& staging, const std::vector<Output>& outputs,
    const OutputOptions& options, Job* job, int first_worker = 0);

// Creates the file at full size (blocks reserved) without writing it.
Status CreateOutput(const Directory& staging, const StagedFile& file);

}  // namespace torch_ckpt
