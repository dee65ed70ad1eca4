// What reads of a checkpoint are made of: items of tensors that are made of
// others as items of these, and codes after their scales.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/read/read_job.h"
#include "engine/read/read_plan.h"

namespace torch_ckpt {

class ItemReads {
 public:
  // Proves that every element of every item is in the checkpoint and fits its
  // target. `neighbours`: see ReadPlan. Errors name tensor or file.
  static Result<ItemReads> Plan(
      const std::shared_ptr<const Checkpoint>& checkpoint,
      const std::vector<ReadItem>& items,
      const std::vector<TargetTensor>& targets, bool neighbours);

  // That are delivered, scales among them.
  uint64_t bytes() const { return bytes_; }

  // Delivers all pieces of what it is given.
  using Deliver = std::function<Status(const PlannedReads&)>;
  // Fills the targets, once. `lost` is the error of a cast that has lost
  // values: what was read may turn out to be another's first.
  Status Run(const Deliver& deliver, Status* lost);

 private:
  explicit ItemReads(std::shared_ptr<const Checkpoint> checkpoint,
                     bool neighbours)
      : checkpoint_(std::move(checkpoint)), neighbours_(neighbours) {}

  Status AddGroups(const std::vector<ReadItem>& items,
                   const std::vector<TargetTensor>& targets);
  Status ReadScales(const PlannedReads& planned, const Deliver& deliver) const;

  std::shared_ptr<const Checkpoint> checkpoint_;  // where nothing is derived
  bool neighbours_;
  // Those that need scales are in groups whose scales are read together.
  std::deque<PlannedReads> groups_;
  std::vector<TargetTensor> zeros_;  // what nothing is stored for
  uint64_t bytes_ = 0;
};

}  // namespace torch_ckpt
