#include "engine/read/read_job.h"

#include <algorithm>
#include <optional>

#include "engine/read/read_plan.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {

Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, StoredInputs* shared) {
  const auto files = checkpoint->LendFiles(plan.direct_io);
  TC_ASSIGN_OR_RETURN(PlannedReads planned,
                      PlannedReads::Make(*checkpoint, plan.items, targets));
  ReadReport report;
  report.bytes_needed = planned.bytes();
  job->AddTotal(report.bytes_needed);
  const int workers = static_cast<int>(
      std::min<size_t>(static_cast<size_t>(std::max(1, plan.workers)),
                       std::max<size_t>(1, planned.size())));
  std::optional<StoredInputs> own;
  if (!shared) own.emplace(files, plan.verify, workers, Wholes::kAtOnce);
  StoredInputs* const inputs = shared ? shared : &*own;
  TC_RETURN_IF_ERROR(ForEachItem(
      workers, static_cast<int64_t>(planned.size()), job,
      [&](int64_t i, int worker) -> Status {
        const ReadPiece piece = planned.Piece(static_cast<size_t>(i));
        // For one piece at a time: more workers than the budget holds just
        // wait.
        TC_ASSIGN_OR_RETURN(const ArenaLease lease,
                            LeaseBuffer(kFetchBytes, job, /*present=*/false));
        const WantedRuns wanted{piece.file,         piece.runs,
                                planned.storages(), piece.shared,
                                plan.neighbours,    nullptr};
        TC_ASSIGN_OR_RETURN(const uint64_t delivered,
                            inputs->Read(worker, wanted, lease.span(), &lease));
        job->AddDone(delivered);
        return {};
      }));
  if (!shared) TC_RETURN_IF_ERROR(own->Check(job));
  for (CastTarget& cast : planned.casts()) TC_RETURN_IF_ERROR(cast.Finish());
  report.bytes_read = inputs->bytes_read();
  report.bytes_verified = inputs->bytes_verified();
  return report;
}

}  // namespace torch_ckpt
