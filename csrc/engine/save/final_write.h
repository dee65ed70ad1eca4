// A rank's boxes inside final files that the coordinator has staged.
//
// What a rank writes there by itself begins and ends at multiples of 4096 (or
// at the end of the file): no two ranks touch one block. The few bytes before
// and behind, and the boxes of tensors that are gathered, go to a spill file
// beside, from which the coordinator puts them in place; gathered boxes that
// the ranks of one node have only where these cannot write them together.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/save/final_files.h"
#include "engine/save/ring_write.h"
#include "engine/write/memory_providers.h"
#include "engine/write/output_files.h"

namespace torch_ckpt {

struct WriteTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Dims shape;    // of this box, in elements of dtype
  Dims offsets;  // in the global tensor
  Dims global_shape;
  size_t source = 0;                 // index into the sources
  std::optional<Dtype> stored = {};  // to be cast to, into a final file
};

// Bytes of a final file that stand in a spill.
struct SpillBytes {
  uint32_t file = 0;  // in the list of final files
  ByteRange bytes;    // of that
  uint64_t at = 0;    // in the spill
};

// A box that stands there, row-major.
struct SpillBox {
  std::string tensor;
  Box box;  // in elements
  uint64_t at = 0;
};

// How a final save is written by one rank.
struct FinalWriteOptions {
  int64_t rank = 0;
  Job* job = nullptr;  // ends waiting for other ranks when it is cancelled
};

struct FinalWrite {
  std::vector<Output> files;  // in the order of the list, with ranges
  ExtentList spill;
  std::vector<SpillBytes> spill_bytes;
  std::vector<SpillBox> spill_boxes;
  std::unique_ptr<RingWork> ring;  // null: none
};

// The sources of `memory` must stay where they are. Meets the other
// ranks of this one's ring, if there is to be one (engine/save/ring_link.h);
// of a ring that this rank leads, the files have what the ring writes as well.
// kConflict, naming tensor and file, where the staged header does not say what
// this rank has: the plan that it stems from was made for other tensors.
Result<FinalWrite> PlanFinalWrite(const Directory& staging,
                                  const std::vector<WriteTensor>& tensors,
                                  MemorySources* memory,
                                  const FinalWriteOptions& options);

}  // namespace torch_ckpt
