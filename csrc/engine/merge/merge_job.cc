#include "engine/merge/merge_job.h"

namespace torch_ckpt {

Result<std::vector<std::vector<WrittenRange>>> RunMergeJob(
    const MergePlan& plan, const Directory& staging,
    const std::vector<Output>& outputs, Job* job) {
  const MergeOptions& options = plan.options();
  TC_ASSIGN_OR_RETURN(auto written,
                      WriteOutputs(staging, outputs, options.output, job));
  TC_RETURN_IF_ERROR(plan.inputs()->Check(options.verify, job));
  return written;
}

}  // namespace torch_ckpt
