#include "engine/read/value_jobs.h"

#include <algorithm>

#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

// What `of` says of every stretch, added up for each of the tensors in order,
// so that the outcome does not depend on threads.
template <class Value, class Of>
Result<std::vector<Value>> Sum(TensorStream* stream, size_t tensors,
                               int workers, Job* job, const Of& of) {
  std::vector<Value> sums(tensors), values;
  while (true) {
    TC_ASSIGN_OR_RETURN(const auto next, stream->Next());
    if (next.empty()) return sums;
    values.resize(next.size());
    TC_RETURN_IF_ERROR(ForEachItem(std::max(1, workers),
                                   static_cast<int64_t>(next.size()), job,
                                   [&](int64_t i, int) -> Status {
                                     const auto at = static_cast<size_t>(i);
                                     values[at] = of(next[at]);
                                     return {};
                                   }));
    for (size_t i = 0; i < next.size(); ++i) {
      sums[next[i].tensor].Add(values[i]);
    }
  }
}

}  // namespace

Result<std::vector<Difference>> RunCompareJob(
    const std::shared_ptr<const Checkpoint>& a,
    const std::shared_ptr<const Checkpoint>& b,
    const std::vector<std::string>& names, const Tolerances& tolerances,
    const StreamOptions& options, Job* job) {
  TC_ASSIGN_OR_RETURN(TensorStream stream,
                      TensorStream::Open({a, b}, names, options, job));
  return Sum<Difference>(
      &stream, names.size(), options.workers, job, [&](const auto& each) {
        return CompareElements(stream.dtype(each.tensor, 0), each.bytes[0],
                               stream.dtype(each.tensor, 1), each.bytes[1],
                               each.elements, tolerances);
      });
}

Result<TensorStatistics> RunStatisticsJob(
    const std::shared_ptr<const Checkpoint>& checkpoint,
    const std::string& name, const StreamOptions& options, Job* job) {
  const std::vector<std::string> names{name};
  TC_ASSIGN_OR_RETURN(TensorStream stream,
                      TensorStream::Open({checkpoint}, names, options, job));
  const Dtype dtype = stream.dtype(0, 0);
  if (NumberKindOf(dtype) == NumberKind::kNone) {
    return TensorStatistics{dtype, {}};
  }
  TC_ASSIGN_OR_RETURN(
      const std::vector<Statistics> sums,
      Sum<Statistics>(&stream, 1, options.workers, job, [&](const auto& each) {
        return StatisticsOf(dtype, each.bytes[0], each.elements);
      }));
  return TensorStatistics{dtype, sums[0]};
}

}  // namespace torch_ckpt
