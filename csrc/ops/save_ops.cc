// save: tensors into a checkpoint of this process alone, committed.
//
// Plan:
//   {"path": directory, "names": [fqn] or one text, a name a line,
//    "overwrite": bool, "max_shard_size": bytes, "workers": int, "sync": bool,
//    "direct_io": bool, "job": id or 0}
// with a name per tensor. The files are called as transformers wants them. The
// result, {"save_id", "files", "bytes"}, is kept in the job.
#include "engine/save/save_job.h"
#include "json/options.h"
#include "ops/tensors.h"

namespace torch_ckpt::ops {
namespace {

constexpr Field kSavePlan[] = {
    {"path", FieldType::kString},     {"names", FieldType::kNames},
    {"overwrite", FieldType::kBool},  {"max_shard_size", FieldType::kInteger},
    {"workers", FieldType::kInteger}, {"sync", FieldType::kBool},
    {"direct_io", FieldType::kBool},  {"job", FieldType::kInteger}};

Result<WriteTensor> WholeTensor(const Tensor& tensor, std::string name,
                                size_t number, const SourceTensor& source) {
  WriteTensor whole;
  whole.name = std::move(name);
  whole.source = number;
  const auto dtype = DtypeOf(tensor);
  if (!dtype) {
    return Unsupported("safetensors cannot hold its dtype")
        .WithTensor(whole.name);
  }
  whole.dtype = *dtype;
  Result<Dims> shape = ShapeInHeader(source.sizes, *dtype);
  if (!shape.ok()) return shape.status().WithTensor(whole.name);
  whole.shape = whole.global_shape = *shape;
  whole.offsets = Dims::Filled(shape->size(), 0);
  return whole;
}

Status RunSave(const std::vector<Tensor>& tensors, const Json& plan, Job* job,
               int64_t* report) {
  SavePlan save;
  TC_ASSIGN_OR_RETURN(save.path, GetPath(plan, "path"));
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      NamesOfEach(plan, tensors.size()));
  save.overwrite = GetBool(plan, "overwrite", true);
  TC_ASSIGN_OR_RETURN(const int64_t most, GetInt(plan, "max_shard_size", 0));
  if (most < 0) return InvalidArgument("'max_shard_size' is negative");
  save.rule.max_bytes = static_cast<uint64_t>(most);
  save.naming.number_single = false;
  save.options = OutputOptionsOf(plan);
  std::vector<SourceTensor> sources;
  sources.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    Result<SourceTensor> source = WriteSourceOf(tensors[i]);
    if (!source.ok()) return source.status().WithTensor(names[i]);
    sources.push_back(*source);
    TC_ASSIGN_OR_RETURN(
        WriteTensor tensor,
        WholeTensor(tensors[i], std::move(names[i]), i, *source));
    save.tensors.push_back(std::move(tensor));
  }
  TC_ASSIGN_OR_RETURN(const SavedCheckpoint saved,
                      RunSaveJob(std::move(save), sources, job));
  const std::vector<ManifestFile>& files = saved.manifest.files;
  uint64_t bytes = 0;
  for (const ManifestFile& file : files) bytes += file.bytes;
  const Json result = {{"save_id", saved.manifest.save_id},
                       {"files", files.size()},
                       {"bytes", bytes}};
  job->SetResult(result.dump());
  report[0] = 1;
  for (const SourceTensor& source : sources) {
    report[1] += static_cast<int64_t>(source.bytes());
  }
  report[2] = static_cast<int64_t>(bytes);
  report[3] = static_cast<int64_t>(files.size());
  for (const std::string& text : saved.warnings) Warn(text);
  return {};
}

}  // namespace

void save(std::vector<Tensor> tensors, Tensor plan, Tensor report) {
  RunOp("save", kSavePlan, plan, report,
        [&](const Json& parsed, Job* job, int64_t* values) {
          return RunSave(tensors, parsed, job, values);
        });
}

}  // namespace torch_ckpt::ops
