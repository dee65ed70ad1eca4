#include "ops/tensors.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "json/held.h"

namespace torch_ckpt::ops {
namespace {

Result<SourceTensor> Describe(const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  if (rank > kMaxDims) {
    return Unsupported("a tensor has " + std::to_string(rank) +
                       " dimensions, at most " + std::to_string(kMaxDims) +
                       " are supported");
  }
  // scalar_type() throws for dtypes newer than the floor; the size of an
  // element is all that is needed, and known for every one.
  int32_t dtype = 0;
  if (aoti_torch_get_dtype(tensor.get(), &dtype) != 0) {
    return Internal("a tensor has no dtype");
  }
  SourceTensor source;
  source.element_bytes =
      static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t count = 1;
  for (int64_t d = 0; d < rank; ++d) {
    const auto i = static_cast<size_t>(d);
    source.sizes.push_back(sizes[i]);
    source.strides.push_back(strides[i] * source.element_bytes);
    count *= sizes[i];
  }
  source.data = static_cast<const std::byte*>(tensor.data_ptr());
  if (count > 0 && !source.data) {
    return InvalidArgument("a tensor has no memory (meta or fake tensor?)");
  }
  return source;
}

Result<Json> ParsePlanTensor(const Tensor& plan) {
  TC_ASSIGN_OR_RETURN(const SourceTensor bytes, SourceOf(plan));
  if (bytes.element_bytes != 1 || bytes.sizes.size() != 1 ||
      (bytes.sizes[0] > 1 && bytes.strides[0] != 1)) {
    return InvalidArgument("the plan is not a dense uint8 tensor");
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data);
  return ParseObject({text, static_cast<size_t>(bytes.sizes[0])}, "plan");
}

}  // namespace

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  if (status.kind() == ErrorKind::kInvalidArgument) {
    throw std::invalid_argument(status.ToString());
  }
  throw std::runtime_error(status.ToString());
}

Result<int64_t*> ReportOf(Tensor& report) {
  TC_ASSIGN_OR_RETURN(const SourceTensor memory, SourceOf(report));
  if (memory.element_bytes != 8 || memory.sizes.size() != 1 ||
      memory.sizes[0] < kReportSize || memory.strides[0] != 8) {
    return InvalidArgument(
        "the report is not a dense int64 tensor of at least " +
        std::to_string(kReportSize) + " elements");
  }
  auto* values = static_cast<int64_t*>(report.mutable_data_ptr());
  std::fill_n(values, kReportSize, 0);
  return values;
}

void RunOp(const Tensor& plan, Tensor& report, const OpWork& work) {
  Result<int64_t*> values = ReportOf(report);
  ThrowIfError(values.status());
  Result<Json> parsed = ParsePlanTensor(plan);
  ThrowIfError(parsed.status());
  Result<std::shared_ptr<Job>> job = JobOf(*parsed);
  ThrowIfError(job.status());
  Status status = work(*parsed, job->get(), *values);
  if (!status.ok()) ThrowIfError((*job)->Fail(std::move(status)));
}

Result<SourceTensor> SourceOf(const Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return Unsupported("a tensor is not in host memory");
  }
  return Describe(tensor);
}

Result<SourceTensor> WriteSourceOf(const Tensor& tensor) {
  if (!tensor.is_cuda()) return SourceOf(tensor);
  TC_ASSIGN_OR_RETURN(SourceTensor source, Describe(tensor));
  source.device = static_cast<int>(tensor.get_device_index());
  return source;
}

}  // namespace torch_ckpt::ops
