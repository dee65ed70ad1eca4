// write: tensors into files of a staging directory.
//
// Plan:
//   {"staging": directory, "job": id or 0, "workers": int, "sync": bool,
//    "direct": bool, "files": [file, ...]}
//   file = {"name": str, "role": "data", "sharded": bool,
//           "names": [fqn], "dtypes": [str], "sources": [int],
//           "offsets": [[int] or null], "global_shapes": [[int] or null]}
//        | {"name": str, "role": "objects" | "extra", "sources": [int]}
// Null offsets mean zeros, a null global shape the tensor's own. The result,
// {"files": [{"staged", "name", "id", "role", "bytes", "crc32c"}]}, is kept in
// the job.
#include "capi/requests.h"
#include "ops/tensors.h"

namespace torch_ckpt::ops {
namespace {

Result<size_t> SourceAt(const Json& file, size_t i, size_t sources) {
  const auto it = file.find("sources");
  if (it == file.end() || !it->is_array() || i >= it->size() ||
      !(*it)[i].is_number_unsigned() || (*it)[i].get<size_t>() >= sources) {
    return InvalidArgument("the plan's 'sources' do not fit the tensors");
  }
  return (*it)[i].get<size_t>();
}

Result<WriteTensor> ParseTensor(const Json& file, size_t i,
                                const std::vector<SourceTensor>& sources) {
  WriteTensor tensor;
  const Json& name = file["names"][i];
  const auto dtypes = file.find("dtypes");
  if (!name.is_string() || dtypes == file.end() || i >= dtypes->size() ||
      !(*dtypes)[i].is_string()) {
    return InvalidArgument("the plan's 'names' or 'dtypes' are malformed");
  }
  tensor.name = name.get<std::string>();
  const auto dtype = DtypeFromName((*dtypes)[i].get<std::string>());
  if (!dtype) {
    return Unsupported("has a dtype that safetensors cannot hold: " +
                       (*dtypes)[i].get<std::string>())
        .WithTensor(tensor.name);
  }
  tensor.dtype = *dtype;
  TC_ASSIGN_OR_RETURN(tensor.source, SourceAt(file, i, sources.size()));
  const SourceTensor& source = sources[tensor.source];
  tensor.shape = source.sizes;
  // torch packs sub-byte elements; the header counts them singly.
  const int64_t packed =
      DtypeBits(tensor.dtype) < 8 ? DtypeUnit(tensor.dtype).elements : 1;
  if (packed > 1) {
    if (tensor.shape.empty()) {
      return Unsupported("packed elements need a dimension")
          .WithTensor(tensor.name);
    }
    tensor.shape[tensor.shape.size() - 1] *= packed;
  }
  TC_ASSIGN_OR_RETURN(const auto offsets, DimsAt(file, "offsets", i));
  TC_ASSIGN_OR_RETURN(const auto global, DimsAt(file, "global_shapes", i));
  tensor.offsets = offsets ? *offsets : Dims::Filled(tensor.shape.size(), 0);
  tensor.global_shape = global ? *global : tensor.shape;
  return tensor;
}

Result<WriteFile> ParseFile(const Json& item,
                            const std::vector<SourceTensor>& sources) {
  WriteFile file;
  TC_ASSIGN_OR_RETURN(file.name, capi::GetString(item, "name"));
  TC_ASSIGN_OR_RETURN(const std::string role, capi::GetString(item, "role"));
  TC_ASSIGN_OR_RETURN(file.role, capi::RoleFromName(role));
  file.sharded = capi::GetBool(item, "sharded", false);
  const size_t count = file.role == FileRole::kData
                           ? item.value("names", Json::array()).size()
                           : item.value("sources", Json::array()).size();
  for (size_t i = 0; i < count; ++i) {
    if (file.role == FileRole::kData) {
      TC_ASSIGN_OR_RETURN(WriteTensor tensor, ParseTensor(item, i, sources));
      file.tensors.push_back(std::move(tensor));
    } else {
      TC_ASSIGN_OR_RETURN(const size_t source,
                          SourceAt(item, i, sources.size()));
      file.raw.push_back(source);
    }
  }
  return file;
}

Status Run(const std::vector<Tensor>& tensors, const Json& plan, Job* job,
           int64_t* report) {
  std::vector<SourceTensor> sources;
  sources.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    TC_ASSIGN_OR_RETURN(const SourceTensor source, WriteSourceOf(tensor));
    sources.push_back(source);
  }
  WritePlan write_plan;
  TC_ASSIGN_OR_RETURN(write_plan.staging, capi::GetString(plan, "staging"));
  write_plan.options = capi::OutputOptionsOf(plan);
  for (const Json& item : plan.value("files", Json::array())) {
    TC_ASSIGN_OR_RETURN(WriteFile file, ParseFile(item, sources));
    write_plan.files.push_back(std::move(file));
  }
  TC_ASSIGN_OR_RETURN(const std::vector<WrittenFile> written,
                      RunWriteJob(write_plan, sources, job));
  Json files = Json::array();
  uint64_t bytes = 0;
  for (const WrittenFile& file : written) {
    files.push_back({{"staged", file.spec.staged},
                     {"name", file.spec.name},
                     {"id", file.spec.id},
                     {"role", capi::RoleName(file.spec.role)},
                     {"bytes", file.spec.bytes},
                     {"crc32c", capi::CrcHex(file.crc32c)}});
    bytes += file.spec.bytes;
  }
  job->SetResult(Json{{"files", std::move(files)}}.dump());
  report[0] = 1;
  report[1] = report[2] = static_cast<int64_t>(bytes);
  report[3] = static_cast<int64_t>(written.size());
  return {};
}

}  // namespace

void write(std::vector<Tensor> tensors, Tensor plan, Tensor report) {
  Result<int64_t*> values = ReportOf(report);
  ThrowIfError(values.status());
  Result<Json> parsed = ParsePlanTensor(plan);
  ThrowIfError(parsed.status());
  Result<std::shared_ptr<Job>> job = JobOfPlan(*parsed, JobKind::kWrite);
  ThrowIfError(job.status());
  Status status = Run(tensors, *parsed, job->get(), *values);
  if (!status.ok()) ThrowIfError((*job)->Fail(std::move(status)));
}

}  // namespace torch_ckpt::ops
