// Requests about jobs: those that other calls run under.
#include "capi/requests.h"
#include "runtime/jobs.h"

namespace torch_ckpt::capi {

Result<Json> JobCreateRequest(const Json&) {
  TC_ASSIGN_OR_RETURN(const int64_t id, Jobs().Add(std::make_shared<Job>()));
  return Json{{"job", id}};
}

Result<Json> JobPollRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_ASSIGN_OR_RETURN(const auto job, Jobs().Find(id));
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
  TC_ASSIGN_OR_RETURN(const auto job, Jobs().Find(id));
  job->Cancel();
  return Json::object();
}

Result<Json> JobFreeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_RETURN_IF_ERROR(Jobs().Take(id).status());
  return Json::object();
}

}  // namespace torch_ckpt::capi
