#include "engine/read/read_job.h"

#include <algorithm>
#include <cstring>
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

// Items of tensors that are made of stored ones, as items of these.
struct StoredItems {
  ReadPlan plan;
  std::vector<TargetTensor> targets;
  std::vector<TargetTensor> zeros;  // what nothing is stored for
};

TargetTensor TargetAt(const TargetTensor& whole, const StridedBox& part) {
  TargetTensor target = whole;
  target.data = reinterpret_cast<std::byte*>(part.base);
  target.sizes = part.box.sizes;
  target.strides = part.strides;
  return target;
}

Status AddParts(const DerivedTensor& derived, const ReadItem& item,
                const TargetTensor& target, StoredItems* out) {
  const StridedBox wanted{item.box, reinterpret_cast<uint64_t>(target.data),
                          target.strides};
  std::vector<StridedBox> boxes;
  int64_t left = item.box.Volume();
  for (const MappedPart& part : derived.parts) {
    boxes.clear();
    MapBox(part.pair, wanted, &boxes);
    for (const StridedBox& box : boxes) {
      left -= box.box.Volume();
      if (part.stored.empty()) {
        out->zeros.push_back(TargetAt(target, box));
        continue;
      }
      out->plan.items.push_back(
          {part.stored, box.box, "", out->targets.size(), item.shared});
      out->targets.push_back(TargetAt(target, box));
    }
  }
  if (left == 0) return {};
  return Internal(std::to_string(left) +
                  " elements would not be read: this is a bug of torch_ckpt")
      .WithTensor(item.name);
}

Result<StoredItems> AsStored(const Checkpoint& checkpoint, const ReadPlan& plan,
                             const std::vector<TargetTensor>& targets) {
  StoredItems out;
  out.plan = plan;
  out.plan.items.clear();
  for (const ReadItem& item : plan.items) {
    if (item.target >= targets.size()) {
      return InvalidArgument("has no target").WithTensor(item.name);
    }
    const TargetTensor& target = targets[item.target];
    const DerivedTensor* const derived =
        item.file.empty() ? checkpoint.FindDerived(item.name) : nullptr;
    if (derived == nullptr) {
      ReadItem same = item;
      same.target = out.targets.size();
      out.plan.items.push_back(std::move(same));
      out.targets.push_back(target);
      continue;
    }
    const auto entry =
        static_cast<uint32_t>(checkpoint.catalog().Find(item.name));
    const Dims& shape = checkpoint.catalog().entries()[entry].shape;
    if (!Inside(item.box, shape) || item.box.sizes != target.sizes) {
      return InvalidArgument("box " + item.box.ToString() +
                             " is not inside the shape " + shape.ToString() +
                             ", or not that of the target")
          .WithTensor(item.name);
    }
    TC_RETURN_IF_ERROR(AddParts(*derived, item, target, &out));
  }
  return out;
}

void FillWithZeros(const TargetTensor& target, int dim, std::byte* data) {
  if (dim == target.sizes.size()) {
    std::memset(data, 0, static_cast<size_t>(target.element_bytes));
    return;
  }
  for (int64_t i = 0; i < target.sizes[dim]; ++i) {
    FillWithZeros(target, dim + 1, data + i * target.strides[dim]);
  }
}

}  // namespace

Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, StoredInputs* shared) {
  if (checkpoint->mapped_from()) {
    TC_ASSIGN_OR_RETURN(const StoredItems stored,
                        AsStored(*checkpoint, plan, targets));
    TC_ASSIGN_OR_RETURN(const ReadReport report,
                        RunReadJob(checkpoint->mapped_from(), stored.plan,
                                   stored.targets, job, shared));
    for (const TargetTensor& zeros : stored.zeros) {
      FillWithZeros(zeros, 0, zeros.data);
    }
    return report;
  }
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
    for (const auto& each : planned.casts()) {
      if (cast.ok()) cast = each->Finish();
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
