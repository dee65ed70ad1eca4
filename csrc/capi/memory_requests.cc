// Requests about the memory of the process: its arenas, and regions of others.
#include <algorithm>
#include <limits>
#include <memory>

#include "capi/requests.h"
#include "engine/save/snapshot_job.h"
#include "runtime/adopted.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"
#include "runtime/jobs.h"

namespace torch_ckpt::capi {

Result<Json> ArenaRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t budget, GetInt(request, "budget", -1));
  Arena& arena = GetBool(request, "snapshots", false) ? Arena::Snapshots()
                                                      : Arena::Process();
  if (budget >= 0) arena.SetBudget(static_cast<uint64_t>(budget));
  if (GetBool(request, "trim", false)) {
    arena.Trim();
    AdoptedMemory::Process().Trim();
  }
  TC_ASSIGN_OR_RETURN(const int64_t prepare, GetInt(request, "prepare", 0));
  if (prepare > 0) {
    SnapshotOptions options;
    if (GetBool(request, "shared", false)) options.kind = MemoryKind::kShared;
    TC_ASSIGN_OR_RETURN(const int64_t workers,
                        GetInt(request, "workers", options.workers));
    options.workers = static_cast<int>(std::clamp<int64_t>(workers, 1, 256));
    TC_RETURN_IF_ERROR(
        PrepareRegion(static_cast<uint64_t>(prepare), options, &arena));
  }
  const ArenaStats stats = arena.Stats();
  return Json{{"budget", stats.budget},
              {"mapped", stats.mapped},
              {"leased", stats.leased},
              {"peak_mapped", stats.peak_mapped},
              {"crc32c", Crc32cImplementation()}};
}

// The region that a "stage" of another process has told of: leased until the
// job is freed, as a snapshot that is taken here.
Result<Json> AdoptRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_ASSIGN_OR_RETURN(const auto job, Jobs().Find(id));
  TC_ASSIGN_OR_RETURN(const int64_t fd, GetInt(request, "fd"));
  TC_ASSIGN_OR_RETURN(const int64_t offset, GetInt(request, "offset"));
  TC_ASSIGN_OR_RETURN(const int64_t bytes, GetInt(request, "bytes"));
  if (fd < 0 || fd > std::numeric_limits<int>::max() || offset < 0 ||
      bytes <= 0) {
    return InvalidArgument("that is no region of another process");
  }
  TC_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                      AdoptedMemory::Process().Adopt(
                          static_cast<int>(fd), static_cast<uint64_t>(offset),
                          static_cast<size_t>(bytes)));
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  job->Hold(std::move(memory));
  return Json{{"address", address}};
}

}  // namespace torch_ckpt::capi
