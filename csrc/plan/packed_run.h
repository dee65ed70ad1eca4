// The source of a run as rows that a device can copy, packed one after another.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "plan/runs.h"

namespace torch_ckpt {

// `count` rows of `bytes` bytes, one every `pitch` bytes of the source, which
// do not overlap.
struct PackedRows {
  uint64_t from = 0;
  uint64_t bytes = 0;
  uint64_t pitch = 0;
  uint64_t count = 1;
};

struct PackedRun {
  std::vector<PackedRows> rows;  // in the order in which they are packed
  uint64_t bytes = 0;            // of all of them
  Run run;  // the same destination, from the packed rows, of which the first
            // byte is 0
  bool as_wanted = false;  // they are a stretch of the destination as it is
};

// Rows as long as they can be: what goes on where the last ended is one, in
// whatever order the destination has it, and so are narrow ones with little
// between them, which is copied too. What an expanded tensor repeats is packed
// once. nullopt where that is more than `max_bytes`, or too many rows that do
// not follow each other: halve the run. REQUIRES: a run of MakeRun of at most
// max_bytes contiguous bytes.
std::optional<PackedRun> Pack(const Run& run, uint64_t max_bytes);

// Both halves of a run, cut in the loop that goes furthest through the source.
// REQUIRES: a run of MakeRun that has a loop with a stride.
std::pair<Run, Run> Halved(const Run& run);

}  // namespace torch_ckpt
