#include "engine/read/value_jobs.h"

#include <algorithm>
#include <span>

#include "runtime/workers.h"

namespace torch_ckpt {
namespace {

using Part = TensorStream::Part;

// What `of` says of every part, added up for each of the tensors in order, so
// that the outcome does not depend on threads.
template <class Value, class Of>
Result<std::vector<Value>> Sum(TensorStream* stream, size_t tensors,
                               int workers, Job* job, const Of& of) {
  std::vector<Value> sums(tensors), values;
  while (true) {
    TC_ASSIGN_OR_RETURN(const std::span<const Part> parts, stream->Next());
    if (parts.empty()) return sums;
    values.resize(parts.size());
    TC_RETURN_IF_ERROR(ForEachItem(std::max(1, workers),
                                   static_cast<int64_t>(parts.size()), job,
                                   [&](int64_t i, int) -> Status {
                                     const auto at = static_cast<size_t>(i);
                                     values[at] = of(parts[at]);
                                     return {};
                                   }));
    for (size_t i = 0; i < parts.size(); ++i) {
      sums[parts[i].tensor].Add(values[i]);
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
      &stream, names.size(), options.workers, job, [&](const Part& part) {
        return CompareElements(stream.dtype(part.tensor, 0), part.bytes[0],
                               stream.dtype(part.tensor, 1), part.bytes[1],
                               part.elements, tolerances);
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
      Sum<Statistics>(&stream, 1, options.workers, job, [&](const Part& part) {
        return StatisticsOf(dtype, part.bytes[0], part.elements);
      }));
  return TensorStatistics{dtype, sums[0]};
}

}  // namespace torch_ckpt
