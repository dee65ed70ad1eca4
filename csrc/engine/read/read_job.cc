#include "engine/read/read_job.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/read/item_reads.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {

namespace {

// Delivers what is planned, from several threads.
Status Deliver(const PlannedReads& planned, const ReadPlan& plan, int workers,
               StoredInputs* inputs, Job* job) {
  const auto needed = static_cast<int>(
      std::clamp<size_t>(planned.size(), 1, static_cast<size_t>(workers)));
  return ForEachItem(
      needed, static_cast<int64_t>(planned.size()), job,
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
      });
}

}  // namespace

Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, StoredInputs* shared) {
  const auto files = checkpoint->LendFiles(plan.direct_io);
  TC_ASSIGN_OR_RETURN(
      ItemReads reads,
      ItemReads::Plan(checkpoint, plan.items, targets, plan.neighbours));
  ReadReport report;
  report.bytes_needed = reads.bytes();
  job->AddTotal(report.bytes_needed);
  const int workers = std::max(1, plan.workers);
  std::optional<StoredInputs> own;
  if (!shared) own.emplace(files, plan.verify, workers, Wholes::kAtOnce);
  StoredInputs* const inputs = shared ? shared : &*own;
  Status lost;
  TC_RETURN_IF_ERROR(reads.Run(
      [&](const PlannedReads& planned) {
        return Deliver(planned, plan, workers, inputs, job);
      },
      &lost));
  if (!shared) TC_RETURN_IF_ERROR(own->Check(job));
  TC_RETURN_IF_ERROR(std::move(lost));
  report.bytes_read = inputs->bytes_read();
  report.bytes_verified = inputs->bytes_verified();
  return report;
}

}  // namespace torch_ckpt
