// write: tensors into files of a staging directory.
//
// Plan:
//   {"staging": directory, "job": id or 0, "workers": int, "sync": bool,
//    "direct_io": bool, "files": [file, ...], "final": tensors or null,
//    "rank": int (with "final"), "join": bool}
//   tensors = {"first_source": int,
//              "names": [fqn] or one text, a name a line,
//              "dtypes": [str] or one for all,
//              "offsets": [[int] or null], "global_shapes": [[int] or null],
//              "stored": as "dtypes", of "final"}
//   file = {"name": str, "role": "data"} and tensors
//        | {"name": str, "role": "objects" | "extra", "first_source": int,
//           "source_count": int}
// Those of "final" go to the files that the coordinator has staged, cast to the
// dtypes of "stored" where that is there, which must be those of the files'
// headers. Boxes of one tensor in a file are one where they make a box, but for
// "join" false, and else packed. A file takes its tensors one after another
// from `tensors`, from number `first_source` on. Null offsets mean zeros, a
// null global shape the tensor's own; either column may be null or absent as a
// whole. The result,
// {"files": [{"staged", "name", "id", "role", "bytes", "crc32c"}], "final":
// what json/written.h says}, is kept in the job.
#include "engine/save/write_job.h"
#include "json/options.h"
#include "json/written.h"
#include "ops/tensors.h"

namespace torch_ckpt::ops {
namespace {

constexpr Field kWritePlan[] = {
    {"staging", FieldType::kString},  {"files", FieldType::kList},
    {"final", FieldType::kObject},    {"rank", FieldType::kInteger},
    {"workers", FieldType::kInteger}, {"sync", FieldType::kBool},
    {"direct_io", FieldType::kBool},  {"job", FieldType::kInteger},
    {"join", FieldType::kBool}};

// What column `field` says of every name.
Result<std::vector<Dtype>> ParseDtypes(const Json& file, const char* field,
                                       const std::vector<std::string>& names) {
  const auto it = file.find(field);
  if (it != file.end() && it->is_string()) {
    TC_ASSIGN_OR_RETURN(const Dtype dtype, ParseDtype(*it, {}));
    return std::vector<Dtype>(names.size(), dtype);
  }
  TC_ASSIGN_OR_RETURN(const Json* list, GetList(file, field));
  if (list->size() != names.size()) {
    return InvalidArgument("tensors need as many '" + std::string(field) +
                           "' as 'names'");
  }
  std::vector<Dtype> dtypes;
  dtypes.reserve(list->size());
  for (const Json& name : *list) {
    TC_ASSIGN_OR_RETURN(const Dtype dtype,
                        ParseDtype(name, names[dtypes.size()]));
    dtypes.push_back(dtype);
  }
  return dtypes;
}

// REQUIRES: `source` is the tensor's own.
Result<WriteTensor> ParseTensor(const Json& file, size_t i, std::string name,
                                Dtype dtype, const SourceTensor& source) {
  WriteTensor tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  const Result<Dims> shape = ShapeInHeader(source.sizes, dtype);
  if (!shape.ok()) return shape.status().WithTensor(tensor.name);
  tensor.shape = *shape;
  TC_ASSIGN_OR_RETURN(const auto offsets, GetDimsAt(file, "offsets", i));
  TC_ASSIGN_OR_RETURN(const auto global, GetDimsAt(file, "global_shapes", i));
  tensor.offsets = offsets ? *offsets : Dims::Filled(tensor.shape.size(), 0);
  tensor.global_shape = global ? *global : tensor.shape;
  return tensor;
}

// Adds the tensors of `item` to `out`, or, of a file that holds none, the
// numbers of its sources to `raw`.
Status ParseTensors(const Json& item, const std::vector<SourceTensor>& sources,
                    std::vector<WriteTensor>* out, std::vector<size_t>* raw) {
  TC_ASSIGN_OR_RETURN(const int64_t first, GetInt(item, "first_source"));
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names, GetNames(item, "names"));
  TC_ASSIGN_OR_RETURN(const std::vector<Dtype> dtypes,
                      ParseDtypes(item, "dtypes", names));
  std::vector<Dtype> stored;
  const auto given_stored = item.find("stored");
  if (given_stored != item.end() && !given_stored->is_null()) {
    TC_ASSIGN_OR_RETURN(stored, ParseDtypes(item, "stored", names));
  }
  auto count = static_cast<int64_t>(names.size());
  if (raw) {
    TC_ASSIGN_OR_RETURN(count, GetInt(item, "source_count"));
  }
  const auto given = static_cast<int64_t>(sources.size());
  if (first < 0 || first > given || count < 0 || count > given - first) {
    return InvalidArgument("the plan asks for " + std::to_string(count) +
                           " tensors from number " + std::to_string(first) +
                           " on, of " + std::to_string(given));
  }
  if (!raw) out->reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(i);
    const auto source = static_cast<size_t>(first + i);
    if (raw) {
      raw->push_back(source);
      continue;
    }
    TC_ASSIGN_OR_RETURN(WriteTensor tensor,
                        ParseTensor(item, row, std::move(names[row]),
                                    dtypes[row], sources[source]));
    tensor.source = source;
    if (!stored.empty()) tensor.stored = stored[row];
    out->push_back(std::move(tensor));
  }
  return {};
}

Result<WriteFile> ParseFile(const Json& item,
                            const std::vector<SourceTensor>& sources) {
  WriteFile file;
  TC_ASSIGN_OR_RETURN(file.name, GetString(item, "name"));
  TC_ASSIGN_OR_RETURN(file.role, GetRole(item));
  TC_RETURN_IF_ERROR(
      ParseTensors(item, sources, &file.tensors,
                   file.role == FileRole::kData ? nullptr : &file.raw));
  return file;
}

Status RunWrite(const std::vector<Tensor>& tensors, const Json& plan, Job* job,
                int64_t* report) {
  std::vector<SourceTensor> sources;
  sources.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    TC_ASSIGN_OR_RETURN(const SourceTensor source, WriteSourceOf(tensor));
    sources.push_back(source);
  }
  WritePlan write_plan;
  TC_ASSIGN_OR_RETURN(write_plan.staging, GetString(plan, "staging"));
  write_plan.options = OutputOptionsOf(plan);
  write_plan.join = GetBool(plan, "join", true);
  TC_ASSIGN_OR_RETURN(const Json* planned, GetList(plan, "files"));
  for (const Json& item : *planned) {
    TC_ASSIGN_OR_RETURN(WriteFile file, ParseFile(item, sources));
    write_plan.files.push_back(std::move(file));
  }
  const auto final = plan.find("final");
  if (final != plan.end() && !final->is_null()) {
    TC_RETURN_IF_ERROR(ParseTensors(*final, sources, &write_plan.final_tensors,
                                    /*raw=*/nullptr));
    TC_ASSIGN_OR_RETURN(write_plan.rank, GetInt(plan, "rank"));
  }
  TC_ASSIGN_OR_RETURN(const WrittenPlan written,
                      RunWriteJob(std::move(write_plan), sources, job));
  Json files = Json::array();
  uint64_t bytes = 0;
  for (const StagedFile& file : written.files) {
    files.push_back(FileJson(file));
    bytes += file.bytes;
  }
  for (const WrittenFinal& file : written.final_files) {
    for (const WrittenRange& range : file.ranges) {
      bytes += range.bytes.end - range.bytes.begin;
    }
  }
  if (written.spill) bytes += written.spill->file.bytes;
  job->SetResult(
      Json{{"files", std::move(files)}, {"final", FinalsJson(written)}}.dump());
  report[0] = 1;
  report[1] = report[2] = static_cast<int64_t>(bytes);
  report[3] = static_cast<int64_t>(written.files.size());
  return {};
}

}  // namespace

void write(std::vector<Tensor> tensors, Tensor plan, Tensor report) {
  RunOp("write", kWritePlan, plan, report,
        [&](const Json& parsed, Job* job, int64_t* values) {
          return RunWrite(tensors, parsed, job, values);
        });
}

}  // namespace torch_ckpt::ops
