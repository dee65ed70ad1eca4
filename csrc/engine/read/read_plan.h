// From boxes to the runs that fetch them, grouped by where they stand on disk.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/open/stored_view.h"
#include "engine/read/cast_target.h"
#include "engine/read/read_job.h"
#include "engine/read/stored_inputs.h"
#include "plan/runs.h"

namespace torch_ckpt {

// The runs that need what a file has between two multiples of kFetchBytes:
// run.src is a file offset. A run never leaves its piece, so a segment is read
// once and each piece is one work item.
struct ReadPiece {
  uint32_t file = 0;
  bool shared = false;        // one of its items is
  std::vector<ReadRun> runs;  // by src
};

// All pieces of a job. The ranks of one node that load what thousands of ranks
// have saved have millions of runs: they are kept in as little memory as each
// needs (32 bytes where its bytes are in a row, else 48 and 24 for each loop),
// and the pieces are made of them one at a time.
class PlannedReads {
 public:
  // Proves coverage of every item; an error names its tensor or file.
  static Result<PlannedReads> Make(const Checkpoint& checkpoint,
                                   const std::vector<ReadItem>& items,
                                   const std::vector<TargetTensor>& targets);

  // What the runs deliver.
  uint64_t bytes() const { return bytes_; }
  // The storages that they may be in, by file and offset.
  const std::vector<DigestedRange>& storages() const { return storages_; }

  // Pieces are in ascending order of file and offset. Piece() is of the plan
  // and of casts() in it. Thread-safe.
  size_t size() const { return pieces_.size(); }
  ReadPiece Piece(size_t piece) const;
  // Those of all items whose elements are cast.
  const std::vector<std::unique_ptr<CastTarget>>& casts() { return casts_; }

  // What these need before anything is delivered: boxes of tensors of scales,
  // and whom they fill, row by row.
  struct WantedScales {
    std::string name;  // in Checkpoint::as_stored
    Box box;
    std::shared_ptr<Scales> scales;
  };
  const std::vector<WantedScales>& scales() const { return scales_; }

 private:
  static constexpr uint64_t kLoops = uint64_t{1} << 63;
  struct CompactRun {
    uint64_t src, dst;
    // How many; of one that has loops, where these are in loops_, and kLoops.
    uint64_t bytes;
    uint32_t file, item;
  };
  // Of an item.
  struct Delivery {
    CastTarget* cast = nullptr;
    bool shared = false;
  };

  Status AddTensor(const Checkpoint& checkpoint, const ReadItem& item,
                   const TargetTensor& target);
  Status AddScaled(const ScaledTensor& scaled, const CatalogEntry& entry,
                   const ReadItem& item, const TargetTensor& target,
                   const StoredView& stored);
  void AddCast(const ReadItem& item, const TargetTensor& target,
               const CatalogEntry& entry,
               std::unique_ptr<const CodesTarget> codes);
  Status AddRuns(const StoredView& stored, const StridedBox& to);
  Status AddFile(const Checkpoint& checkpoint, const ReadItem& item,
                 const TargetTensor& target);
  // By pieces; every byte of the run must be in one.
  Status AddRun(const StoredRun& stored);
  void Keep(uint32_t file, const Run& run);
  Run RunOf(const CompactRun& compact) const;
  void MakePieces();

  std::vector<DigestedRange> storages_;
  std::deque<CompactRun> runs_;  // by file and src; no vector, which doubles
  // Bytes, number of loops, and count and strides of each.
  std::deque<int64_t> loops_;
  std::vector<size_t> pieces_;  // the first run of each
  std::vector<Delivery> deliveries_;
  std::vector<std::unique_ptr<CastTarget>> casts_;
  std::vector<WantedScales> scales_;
  std::vector<Run> clipped_;
  uint64_t bytes_ = 0;
};

}  // namespace torch_ckpt
