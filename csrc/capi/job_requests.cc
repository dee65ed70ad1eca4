#include "capi/requests.h"

namespace torch_ckpt::capi {
namespace {

Result<JobKind> KindFromName(const std::string& name) {
  if (name == "write") return JobKind::kWrite;
  if (name == "read") return JobKind::kRead;
  if (name == "merge") return JobKind::kMerge;
  if (name == "verify") return JobKind::kVerify;
  if (name == "stage") return JobKind::kStage;
  return InvalidArgument("unknown kind of job '" + name + "'");
}

}  // namespace

Result<std::shared_ptr<Job>> JobOf(const Json& request, JobKind kind) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job", 0));
  if (id == 0) return std::make_shared<Job>(kind);
  return JobRegistry::Process().Find(id);
}

Result<Json> JobCreateRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "kind"));
  TC_ASSIGN_OR_RETURN(const JobKind kind, KindFromName(name));
  TC_ASSIGN_OR_RETURN(const int64_t id, JobRegistry::Process().Create(kind));
  return Json{{"job", id}};
}

Result<Json> JobPollRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_ASSIGN_OR_RETURN(const auto job, JobRegistry::Process().Find(id));
  Json out = {{"total", job->total()},
              {"done", job->done()},
              {"cancelled", job->cancelled()},
              {"error", nullptr},
              {"result", nullptr}};
  if (job->failed()) out["error"] = ErrorJson(job->status())["error"];
  const std::string result = job->result();
  if (!result.empty()) {
    // Written by the op of this library, so it parses.
    out["result"] = Json::parse(result, nullptr, /*allow_exceptions=*/false);
  }
  return out;
}

Result<Json> JobCancelRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_ASSIGN_OR_RETURN(const auto job, JobRegistry::Process().Find(id));
  job->Cancel();
  return Json::object();
}

Result<Json> JobFreeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_RETURN_IF_ERROR(JobRegistry::Process().Free(id));
  return Json::object();
}

}  // namespace torch_ckpt::capi
