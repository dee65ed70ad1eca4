#include "ops/tensors.h"

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "json/held.h"
#include "json/options.h"
#include "os/fork.h"

namespace torch_ckpt::ops {
namespace {

Result<SourceTensor> Describe(const Tensor& tensor,
                              const char* what = "a tensor") {
  const int64_t rank = tensor.dim();
  if (rank > kMaxDims) {
    return Unsupported(std::string(what) + " has " + std::to_string(rank) +
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
    return InvalidArgument(std::string(what) +
                           " has no memory (meta or fake tensor?)");
  }
  return source;
}

Result<Json> ParsePlanTensor(const Tensor& plan) {
  TC_ASSIGN_OR_RETURN(const SourceTensor bytes, SourceOf(plan, "the plan"));
  if (DtypeOf(plan) != Dtype::kU8 || bytes.sizes.size() != 1 ||
      (bytes.sizes[0] > 1 && bytes.strides[0] != 1)) {
    return InvalidArgument("the plan is not a dense uint8 tensor");
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data);
  return ParseObject({text, static_cast<size_t>(bytes.sizes[0])}, "plan");
}

// A number of threads that no job can have is a mistake in a plan that somebody
// wrote; those of torch_ckpt, which name a job, have what is next to it.
Status CheckWorkers(const Json& plan) {
  TC_ASSIGN_OR_RETURN(const int64_t job, GetInt(plan, "job", 0));
  if (job != 0) return {};
  TC_ASSIGN_OR_RETURN(const int64_t workers,
                      GetInt(plan, "workers", kDefaultWorkers));
  if (workers >= 1 && workers <= kMaxWorkers) return {};
  return InvalidArgument("'workers' is " + std::to_string(workers) +
                         ", and not from 1 to " + std::to_string(kMaxWorkers));
}

}  // namespace

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  if (status.kind() == ErrorKind::kInvalidArgument) {
    throw std::invalid_argument(status.ToString());
  }
  throw std::runtime_error(status.ToString());
}

void Warn(const std::string& text) {
  aoti_torch_warn("torch_ckpt", "", 0, ("torch_ckpt: " + text).c_str());
}

Result<int64_t*> ReportOf(Tensor& report) {
  TC_ASSIGN_OR_RETURN(const SourceTensor memory,
                      SourceOf(report, "the report"));
  if (DtypeOf(report) != Dtype::kI64 || memory.sizes.size() != 1 ||
      memory.sizes[0] < kReportSize || memory.strides[0] != 8) {
    return InvalidArgument(
        "the report is not a dense int64 tensor of at least " +
        std::to_string(kReportSize) + " elements");
  }
  auto* values = static_cast<int64_t*>(report.mutable_data_ptr());
  std::fill_n(values, kReportSize, 0);
  return values;
}

Result<Json> ParsePlan(const char* op, std::span<const Field> fields,
                       const Tensor& plan) {
  TC_RETURN_IF_ERROR(NotInForkedChild());
  TC_ASSIGN_OR_RETURN(Json parsed, ParsePlanTensor(plan));
  TC_RETURN_IF_ERROR(
      CheckFields(parsed, std::string("the plan of ") + op, fields));
  return parsed;
}

void RunOp(const char* op, std::span<const Field> fields, const Tensor& plan,
           Tensor& report, const OpWork& work) {
  Result<int64_t*> values = ReportOf(report);
  ThrowIfError(values.status());
  Result<Json> parsed = ParsePlan(op, fields, plan);
  ThrowIfError(parsed.status());
  Result<std::shared_ptr<Job>> job = JobOf(*parsed);
  ThrowIfError(job.status());
  ThrowIfError(CheckWorkers(*parsed));
  Status status = work(*parsed, job->get(), *values);
  if (status.ok()) return;
  const auto path = parsed->find("path");
  if (path != parsed->end() && path->is_string()) {
    status = std::move(status).WithFile(path->get<std::string>());
  }
  ThrowIfError((*job)->Fail(std::move(status)));
}

Result<std::shared_ptr<const Checkpoint>> CheckpointNamedBy(const Json& plan) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(plan, "checkpoint", 0));
  for (const char* other : {"path", "format"}) {
    const auto given = plan.find(other);
    if (id != 0 && given != plan.end() && !given->is_null()) {
      return InvalidArgument("'checkpoint' and '" + std::string(other) +
                             "' are not given together");
    }
  }
  return CheckpointOf(plan);
}

Result<std::vector<std::string>> NamesOfEach(const Json& plan, size_t count) {
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names, GetNames(plan, "names"));
  if (names.size() == count) return names;
  return InvalidArgument("'names' has " + std::to_string(names.size()) +
                         " names for " + std::to_string(count) + " tensors");
}

Result<SourceTensor> SourceOf(const Tensor& tensor, const char* what) {
  if (!tensor.is_cpu()) {
    return Unsupported(std::string(what) + " is not in host memory");
  }
  return Describe(tensor, what);
}

Result<SourceTensor> WriteSourceOf(const Tensor& tensor) {
  if (!tensor.is_cuda()) return SourceOf(tensor);
  TC_ASSIGN_OR_RETURN(SourceTensor source, Describe(tensor));
  source.device = static_cast<int>(tensor.get_device_index());
  return source;
}

std::optional<Dtype> DtypeOf(const Tensor& tensor) {
  int32_t number = 0;
  if (aoti_torch_get_dtype(tensor.get(), &number) != 0) return std::nullopt;
  // The numbers are c10's, which stand in files of torch.save and of
  // TorchScript; the shims that say them lack some at the floor.
  using torch::headeronly::ScalarType;
  switch (static_cast<ScalarType>(number)) {
    case ScalarType::Bool:
      return Dtype::kBool;
    case ScalarType::Float4_e2m1fn_x2:
      return Dtype::kF4;
    case ScalarType::Byte:
      return Dtype::kU8;
    case ScalarType::Char:
      return Dtype::kI8;
    case ScalarType::Float8_e5m2:
      return Dtype::kF8E5M2;
    case ScalarType::Float8_e4m3fn:
      return Dtype::kF8E4M3;
    case ScalarType::Float8_e8m0fnu:
      return Dtype::kF8E8M0;
    case ScalarType::Float8_e4m3fnuz:
      return Dtype::kF8E4M3Fnuz;
    case ScalarType::Float8_e5m2fnuz:
      return Dtype::kF8E5M2Fnuz;
    case ScalarType::Short:
      return Dtype::kI16;
    case ScalarType::UInt16:
      return Dtype::kU16;
    case ScalarType::Half:
      return Dtype::kF16;
    case ScalarType::BFloat16:
      return Dtype::kBF16;
    case ScalarType::Int:
      return Dtype::kI32;
    case ScalarType::UInt32:
      return Dtype::kU32;
    case ScalarType::Float:
      return Dtype::kF32;
    case ScalarType::ComplexFloat:
      return Dtype::kC64;
    case ScalarType::Double:
      return Dtype::kF64;
    case ScalarType::Long:
      return Dtype::kI64;
    case ScalarType::UInt64:
      return Dtype::kU64;
    default:
      return std::nullopt;
  }
}

Result<Dims> ShapeInHeader(const Dims& sizes, Dtype dtype) {
  if (DtypeBits(dtype) >= 8) return sizes;
  if (sizes.empty()) return Unsupported("packed elements need a dimension");
  Dims shape = sizes;
  shape[shape.size() - 1] *= DtypeUnit(dtype).elements;
  return shape;
}

Tensor BytesTensor(const std::string& bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                               aoti_torch_device_type_cpu(), 0, &handle) != 0) {
    ThrowIfError(Exhausted("torch makes no tensor of " + std::to_string(size) +
                           " bytes"));
  }
  Tensor tensor(handle);
  if (size > 0) {
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return tensor;
}

std::string Take(Text text) {
  size_t size = 0;
  const char* data = nullptr;
  const bool known = torch_string_length(text, &size) == 0 &&
                     torch_string_c_str(text, &data) == 0;
  std::string taken = known ? std::string(data, size) : std::string();
  const bool gone = torch_delete_string(text) == 0;
  if (!known || !gone) ThrowIfError(Internal("torch gives no text"));
  return taken;
}

}  // namespace torch_ckpt::ops
