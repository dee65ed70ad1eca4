#include "engine/read/read_job.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "engine/read/read_plan.h"
#include "runtime/arena.h"
#include "runtime/workers.h"

namespace torch_ckpt {

namespace {

// Scales that are held at once. They are an eighth of what they scale, or less.
constexpr uint64_t kScaleBytes = uint64_t{64} << 20;

// Delivers what is planned, but for scales.
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

// What a plan needs of scales, as a plan.
struct ScalesPlan {
  ReadPlan plan;
  std::vector<TargetTensor> targets;
};

ScalesPlan PlanOfScales(const PlannedReads& planned, const ReadPlan& plan) {
  ScalesPlan out;
  out.plan = plan;
  out.plan.items.clear();
  for (const PlannedReads::WantedScales& wanted : planned.scales()) {
    ReadItem item;
    item.name = wanted.name;
    item.box = wanted.box;
    item.target = out.targets.size();
    item.shared = plan.neighbours;  // small, and near to those of others
    out.plan.items.push_back(std::move(item));
    const MutableByteSpan bytes = wanted.scales->bytes();
    TargetTensor target;
    target.data = bytes.data();
    target.sizes = wanted.box.sizes;
    target.element_bytes =
        static_cast<int64_t>(bytes.size()) / wanted.box.Volume();
    target.strides = DenseStrides(target.sizes, target.element_bytes);
    out.targets.push_back(target);
  }
  return out;
}

// Of the scales that an item needs.
uint64_t ScaleBytesOf(const Checkpoint& checkpoint, const ReadItem& item) {
  const int64_t entry = checkpoint.catalog().Find(item.name);
  if (entry < 0) return 0;
  const ScaledTensor* const scaled =
      checkpoint.FindScaled(static_cast<uint32_t>(entry));
  if (scaled == nullptr || item.box.rank() != scaled->blocks.size()) return 0;
  const int64_t count = BoxOfScales(item.box, scaled->blocks).Volume();
  return static_cast<uint64_t>(count * DtypeBits(scaled->scale_dtype)) / 8;
}

// Planned items, none of which is read yet. Those that need scales are in
// groups whose scales are held together.
Result<std::deque<PlannedReads>> PlanGroups(
    const Checkpoint& checkpoint, const ReadPlan& plan,
    const std::vector<TargetTensor>& targets) {
  std::deque<PlannedReads> groups;
  std::vector<ReadItem> group;
  uint64_t held = 0;
  const auto end_group = [&]() -> Status {
    TC_ASSIGN_OR_RETURN(PlannedReads planned,
                        PlannedReads::Make(checkpoint, group, targets));
    groups.push_back(std::move(planned));
    group.clear();
    held = 0;
    return {};
  };
  if (!checkpoint.as_stored()) {
    TC_ASSIGN_OR_RETURN(PlannedReads planned,
                        PlannedReads::Make(checkpoint, plan.items, targets));
    groups.push_back(std::move(planned));
    return groups;
  }
  for (const ReadItem& item : plan.items) {
    const uint64_t bytes = ScaleBytesOf(checkpoint, item);
    if (held > 0 && held + bytes > kScaleBytes) TC_RETURN_IF_ERROR(end_group());
    held += bytes;
    group.push_back(item);
  }
  TC_RETURN_IF_ERROR(end_group());
  return groups;
}

}  // namespace

Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, StoredInputs* shared) {
  const auto files = checkpoint->LendFiles(plan.direct_io);
  TC_ASSIGN_OR_RETURN(std::deque<PlannedReads> groups,
                      PlanGroups(*checkpoint, plan, targets));
  ReadReport report;
  for (const PlannedReads& planned : groups) {
    report.bytes_needed += planned.bytes();
  }
  job->AddTotal(report.bytes_needed);
  const int workers = std::max(1, plan.workers);
  std::optional<StoredInputs> own;
  if (!shared) own.emplace(files, plan.verify, workers, Wholes::kAtOnce);
  StoredInputs* const inputs = shared ? shared : &*own;
  Status cast;  // what was read may turn out to be another's first
  for (PlannedReads& planned : groups) {
    if (!planned.scales().empty()) {
      const ScalesPlan scales = PlanOfScales(planned, plan);
      TC_ASSIGN_OR_RETURN(const ReadReport read,
                          RunReadJob(checkpoint->as_stored(), scales.plan,
                                     scales.targets, job, inputs));
      report.bytes_needed += read.bytes_needed;
    }
    TC_RETURN_IF_ERROR(Deliver(planned, plan, workers, inputs, job));
    for (CastTarget& each : planned.casts()) {
      if (cast.ok()) cast = each.Finish();
    }
    planned = PlannedReads();  // and its scales
  }
  if (!shared) TC_RETURN_IF_ERROR(own->Check(job));
  TC_RETURN_IF_ERROR(std::move(cast));
  report.bytes_read = inputs->bytes_read();
  report.bytes_verified = inputs->bytes_verified();
  return report;
}

}  // namespace torch_ckpt
