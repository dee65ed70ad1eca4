// Requests about a merge, by one process or by several ranks, and about a
// conversion to archives of torch.
#include <map>

#include "capi/requests.h"
#include "engine/merge/fill_archives.h"
#include "engine/merge/merge_job.h"
#include "format/names.h"
#include "json/held.h"
#include "json/options.h"
#include "json/written.h"

namespace torch_ckpt::capi {
namespace {

constexpr int64_t kMaxShares = 1 << 20;

Result<MergeOptions> ParseOptions(const Json& request) {
  MergeOptions options;
  TC_ASSIGN_OR_RETURN(options.files, FileRuleOf(request));
  if (request.find("stem") != request.end()) {
    TC_ASSIGN_OR_RETURN(options.naming, FileNamingOf(request));
  }
  const auto dtypes = request.find("dtypes");
  if (dtypes != request.end() && dtypes->is_object()) {
    for (const auto& [name, dtype] : dtypes->items()) {
      TC_ASSIGN_OR_RETURN(options.dtypes[name], ParseDtype(dtype, name));
    }
  }
  options.strict = GetBool(request, "strict", true);
  options.objects = GetBool(request, "objects", true);
  TC_ASSIGN_OR_RETURN(const Json* left_out, GetList(request, "left_out"));
  options.cut = !left_out->empty();
  options.verify = GetBool(request, "verify", true);
  options.output = OutputOptionsOf(request);
  return options;
}

struct Input {
  std::shared_ptr<const Checkpoint> checkpoint;
  MergeOptions options;

  Result<MergePlan> Plan(std::vector<std::string> ids) const {
    return MergePlan::Make(checkpoint, options, std::move(ids));
  }
};

// An object of texts; empty where there is none.
Result<std::map<std::string, std::string, std::less<>>> GetTexts(
    const Json& request, const char* field) {
  std::map<std::string, std::string, std::less<>> texts;
  const auto given = request.find(field);
  if (given == request.end() || !given->is_object()) return texts;
  for (const auto& [name, text] : given->items()) {
    if (!text.is_string()) {
      return InvalidArgument(std::string("'") + field + "' holds no texts");
    }
    texts[name] = text.get<std::string>();
  }
  return texts;
}

// The checkpoint of a request, under its "new_names".
Result<std::shared_ptr<const Checkpoint>> RenamedInput(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto given, GetTexts(request, "new_names"));
  TC_ASSIGN_OR_RETURN(auto checkpoint, CheckpointOf(request));
  if (given.empty()) return checkpoint;
  return checkpoint->Renamed({given.begin(), given.end()});
}

Result<Input> ParseInput(const Json& request) {
  Input input;
  TC_ASSIGN_OR_RETURN(input.options, ParseOptions(request));
  TC_ASSIGN_OR_RETURN(input.checkpoint, RenamedInput(request));
  return input;
}

// Of a rank that takes part in a merge that the coordinator has begun.
Result<MergePlan> ParsePlan(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Input input, ParseInput(request));
  TC_ASSIGN_OR_RETURN(const std::string begun,
                      GetString(request, "input_identity"));
  if (input.checkpoint->identity() != begun) {
    return Conflict(
               "is not what the merge began with: it was replaced since, or "
               "this rank sees another directory under this path")
        .WithFile(input.checkpoint->path());
  }
  std::vector<std::string> ids;
  TC_ASSIGN_OR_RETURN(const Json* given, GetList(request, "ids"));
  for (const Json& id : *given) {
    ids.push_back(id.is_string() ? id.get<std::string>() : "");
    if (!IsId(ids.back())) return InvalidArgument("a file id is malformed");
  }
  return input.Plan(std::move(ids));
}

std::vector<std::string> IdsOf(const MergePlan& plan) {
  std::vector<std::string> ids;
  for (const Output& output : plan.outputs()) ids.push_back(output.file.id);
  return ids;
}

// What is said of every output of the plan.
Result<std::vector<std::vector<WrittenRange>>> ParseWrittenFiles(
    const MergePlan& plan, const Json& files) {
  if (!files.is_array() || files.size() != plan.outputs().size()) {
    return InvalidArgument("a share does not fit the plan");
  }
  std::vector<std::vector<WrittenRange>> written;
  for (const Json& file : files) {
    TC_ASSIGN_OR_RETURN(std::vector<WrittenRange> ranges, ParseRanges(file));
    written.push_back(std::move(ranges));
  }
  return written;
}

Json WrittenFilesJson(const std::vector<std::vector<WrittenRange>>& written) {
  Json files = Json::array();
  for (const auto& of_file : written) files.push_back(RangesJson(of_file));
  return files;
}

// Where the merge of a request goes.
Result<MergeTarget> ParseTarget(const Json& request) {
  MergeTarget target;
  TC_ASSIGN_OR_RETURN(target.path, GetString(request, "output"));
  target.overwrite = GetBool(request, "overwrite", false);
  target.others = target.overwrite && GetBool(request, "others", false);
  target.replaces = GetBool(request, "replaces", false);
  TC_ASSIGN_OR_RETURN(target.extras, ExtrasOf(request));
  return target;
}

Result<ForeignTarget> ParseForeign(const Json& request) {
  ForeignTarget target;
  TC_ASSIGN_OR_RETURN(target.path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const std::string to, GetString(request, "to"));
  if (to != "torch" && to != "dcp" && to != "megatron") {
    return InvalidArgument("'to' is no format of archives");
  }
  target.is_file = to == "torch";
  target.overwrite = GetBool(request, "overwrite", false);
  return target;
}

Result<Json> Commit(const MergePlan& plan, BegunMerge* merge,
                    const std::vector<std::string>& extras,
                    std::vector<std::vector<WrittenRange>> written) {
  TC_ASSIGN_OR_RETURN(const Manifest manifest,
                      CommitMerge(plan, merge, extras, std::move(written)));
  uint64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) bytes += file.bytes;
  return Json{{"save_id", manifest.save_id},
              {"files", plan.outputs().size()},
              {"hulls", plan.checkpoint().hulls()},
              {"bytes", bytes},
              {"warnings", merge->session->TakeWarnings()}};
}

}  // namespace

Result<Json> MergeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const Input input, ParseInput(request));
  TC_ASSIGN_OR_RETURN(const MergeTarget target, ParseTarget(request));
  TC_ASSIGN_OR_RETURN(const MergePlan plan, input.Plan({}));
  TC_ASSIGN_OR_RETURN(BegunMerge merge, BeginMerge(plan, target));
  TC_ASSIGN_OR_RETURN(
      auto written,
      RunMergeJob(plan, merge.session->directory(), plan.outputs(), job.get()));
  return Commit(plan, &merge, target.extras, std::move(written));
}

// Over several ranks: the coordinator begins, every rank writes a share of the
// bytes, the coordinator commits with the digests of all.
Result<Json> MergeBeginRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Input input, ParseInput(request));
  TC_ASSIGN_OR_RETURN(const MergeTarget target, ParseTarget(request));
  TC_ASSIGN_OR_RETURN(const MergePlan plan, input.Plan({}));
  TC_ASSIGN_OR_RETURN(BegunMerge merge, BeginMerge(plan, target));
  for (const Output& output : plan.outputs()) {
    TC_RETURN_IF_ERROR(CreateOutput(merge.session->directory(), output.file));
  }
  Json out = {{"staging", merge.session->place().path},
              {"ids", IdsOf(plan)},
              {"in_place", merge.in_place},
              {"warnings", merge.session->TakeWarnings()},
              {"input_identity", plan.checkpoint().identity()}};
  TC_ASSIGN_OR_RETURN(out["session"], Saves().Add(std::move(merge.session)));
  return out;
}

Result<Json> MergeShareRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "staging"));
  TC_ASSIGN_OR_RETURN(const int64_t share, GetInt(request, "share"));
  TC_ASSIGN_OR_RETURN(const int64_t shares, GetInt(request, "shares"));
  if (share < 0 || share >= shares || shares > kMaxShares) {
    return InvalidArgument("there is no such share of the merge");
  }
  Result<Directory> staging = Directory::Open(path);
  if (!staging.ok()) {
    return Incomplete(
               "the staging directory of the coordinator cannot be seen here: "
               "every rank must see the same file system under this path")
        .WithFile(path);
  }
  std::vector<Output> outputs = plan.outputs();
  TakeShare(&outputs, static_cast<int>(share), static_cast<int>(shares));
  TC_ASSIGN_OR_RETURN(const auto own,
                      RunMergeJob(plan, *staging, outputs, job.get()));
  return Json{{"written", WrittenFilesJson(own)}};
}

// Over two requests, since torch lays out between them. "layout" is the number
// of a checkpoint that is open, "tensors" names of the layout and of the
// checkpoint.
Result<Json> BeginArchivesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const ForeignTarget target, ParseForeign(request));
  TC_ASSIGN_OR_RETURN(SaveSession begun, BeginForeign(target));
  auto session = std::make_unique<SaveSession>(std::move(begun));
  Json out = {{"staging", session->directory().Join(std::string(kLayoutName))},
              {"save_id", session->save_id()}};
  TC_ASSIGN_OR_RETURN(out["session"], Saves().Add(std::move(session)));
  return out;
}

Result<Json> CommitArchivesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const ForeignTarget target, ParseForeign(request));
  TC_ASSIGN_OR_RETURN(const auto source, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(auto tensors, GetTexts(request, "tensors"));
  TC_ASSIGN_OR_RETURN(const int64_t layout, GetInt(request, "layout"));
  TC_ASSIGN_OR_RETURN(const auto laid_out, Checkpoints().Find(layout));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  const FillOptions options{std::move(tensors),
                            GetBool(request, "verify", true),
                            OutputOptionsOf(request)};
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  const Status status =
      FillArchives(source, laid_out, options, target, session.get(), job.get());
  if (!status.ok()) {
    Saves().PutBack(id, std::move(session));
    return status;
  }
  uint64_t bytes = 0;
  for (const ManifestFile& file : laid_out->files()) bytes += file.bytes;
  return Json{{"files", laid_out->files().size()},
              {"bytes", bytes},
              {"hulls", source->hulls()}};
}

Result<Json> MergeCommitRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  std::vector<std::vector<WrittenRange>> written(plan.outputs().size());
  TC_ASSIGN_OR_RETURN(const Json* shares, GetList(request, "shares"));
  for (const Json& share : *shares) {
    TC_ASSIGN_OR_RETURN(const auto own, ParseWrittenFiles(plan, share));
    for (size_t f = 0; f < own.size(); ++f) {
      written[f].insert(written[f].end(), own[f].begin(), own[f].end());
    }
  }
  TC_ASSIGN_OR_RETURN(const auto extras, ExtrasOf(request));
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(auto session, Saves().Take(id));
  BegunMerge merge{std::move(session), GetBool(request, "in_place", false)};
  Result<Json> result = Commit(plan, &merge, extras, std::move(written));
  if (!result.ok()) Saves().PutBack(id, std::move(merge.session));
  return result;
}

}  // namespace torch_ckpt::capi
