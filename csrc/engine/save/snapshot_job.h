// The snapshot job: tensors of this process into one leased region of host
// memory, where they stay as they are while the trainer changes its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "engine/write/source_tensor.h"
#include "runtime/arena.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

struct SnapshotOptions {
  int workers = 2;
  // How long to wait for memory that other snapshots have.
  std::chrono::milliseconds patience{0};
  MemoryKind kind = MemoryKind::kPrivate;  // of the region, see Arena::Lease
  // Where the caller gives the region: nothing is leased. It begins at a
  // multiple of kRegionAlignment.
  std::optional<MutableByteSpan> region = {};
};
inline constexpr uint64_t kRegionAlignment = 64;

// Tensors in a region. `offsets[i]` is where the bytes of source i begin, in
// row-major order. The memory belongs to the lease, unless the caller gave it.
struct Snapshot {
  ArenaLease lease;
  uint64_t bytes = 0;  // of the region, that hold tensors
  std::vector<uint64_t> offsets;
};

// Copies every source once: sources that are the same memory, or dense parts of
// others, share a copy. The rest stand in the order of plan/layout.h,
// from the region's first byte on, so that a file of these tensors can be
// written from where they are. Blocks until the copies are done, those from
// devices too; nothing is leased after an error. A copy that a device refuses
// names its tensor, the first where it is of several. kExhausted where the
// arena's budget does not allow it, kInvalidArgument where the caller's region
// is too small, and nothing has been copied then. Cancellation and progress
// through `job`.
//
// Memory that the region has of the system for the first time is taken, and
// page-locked for devices, by the workers, each for what it is about to fill.
//
// REQUIRES: as many names as sources.
Result<Snapshot> RunSnapshotJob(const std::vector<std::string>& names,
                                const std::vector<SourceTensor>& sources,
                                const SnapshotOptions& options, Arena* arena,
                                Job* job);

// Has the system give memory for a state of so many bytes, by `workers`, and
// leaves it idle in the arena for the next snapshot. Errors as
// Arena::Lease.
Status PrepareRegion(uint64_t bytes, const SnapshotOptions& options,
                     Arena* arena);

}  // namespace torch_ckpt
