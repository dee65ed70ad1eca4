// Jobs that compute something of the values of tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/read/tensor_stream.h"
#include "runtime/jobs.h"
#include "values/compare.h"
#include "values/statistics.h"

namespace torch_ckpt {

// How the tensors `names` of two checkpoints differ, in their order. Errors are
// those of TensorStream.
Result<std::vector<Difference>> RunCompareJob(
    const std::shared_ptr<const Checkpoint>& a,
    const std::shared_ptr<const Checkpoint>& b,
    const std::vector<std::string>& names, const Tolerances& tolerances,
    const StreamOptions& options, Job* job);

struct TensorStatistics {
  Dtype dtype = Dtype::kU8;
  Statistics values;  // none are counted of NumberKind::kNone, nor read
};
Result<TensorStatistics> RunStatisticsJob(
    const std::shared_ptr<const Checkpoint>& checkpoint,
    const std::string& name, const StreamOptions& options, Job* job);

}  // namespace torch_ckpt
