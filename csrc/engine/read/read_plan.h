// From boxes to the runs that fetch them, grouped by where they stand on disk.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/read/cast_target.h"
#include "engine/read/read_job.h"
#include "plan/runs.h"

namespace torch_ckpt {

// The runs that need bytes [begin, begin + kCellBytes) of a file; run.src is a
// file offset, run.dst an address. A run never leaves its cell, so a segment is
// read once and each cell is one work item.
inline constexpr uint64_t kCellBytes = uint64_t{4} << 20;

struct ReadRun {
  Run run;
  // Null: run.dst is an address. Else it is where the stored elements would be
  // in this.
  CastTarget* cast = nullptr;
};

struct ReadCell {
  uint32_t file = 0;
  uint64_t begin = 0;
  bool shared = false;        // one of its items is
  std::vector<ReadRun> runs;  // by src
};

struct PlannedReads {
  // What cells may be in (Checkpoint::Placements).
  std::vector<DigestedRange> storages;
  std::vector<ReadCell> cells;
  std::deque<CastTarget> casts;  // cells point there
};

// Proves coverage of every item; kIncomplete names the fqn and the missing box.
Result<PlannedReads> PlanReads(const Checkpoint& checkpoint,
                               const std::vector<ReadItem>& items,
                               const std::vector<TargetTensor>& targets);

}  // namespace torch_ckpt
