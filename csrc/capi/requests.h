// The requests behind torch_ckpt_call, one function each.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "engine/output_files.h"
#include "runtime/jobs.h"

namespace torch_ckpt::capi {

using Json = nlohmann::json;
using Handler = Result<Json> (*)(const Json& request);

// Null for an unknown name.
Handler FindHandler(const std::string& op);

// Field access for handlers: kInvalidArgument names the field.
Result<std::string> GetString(const Json& request, const char* field);
Result<int64_t> GetInt(const Json& request, const char* field,
                       std::optional<int64_t> otherwise = std::nullopt);
// The list in `field`, or an empty one where it is absent or null. Lives as
// long as the request.
Result<const Json*> GetList(const Json& request, const char* field);
// The names in `field`: a list of them, or one text with a name a line, which
// is much cheaper to parse. None where it is absent or null.
Result<std::vector<std::string>> GetNames(const Json& request,
                                          const char* field);
bool GetBool(const Json& request, const char* field, bool otherwise);
Result<Dims> GetDims(const Json& value);
Json DimsJson(const Dims& dims);
Json ErrorJson(const Status& status);

// The job that the request names, or a private one.
Result<std::shared_ptr<Job>> JobOf(const Json& request, JobKind kind);
OutputOptions OutputOptionsOf(const Json& request);
std::string CrcHex(const std::vector<uint32_t>& crc32c);
Result<std::vector<uint32_t>> ParseCrcHex(const std::string& text);
const char* RoleName(FileRole role);
Result<FileRole> RoleFromName(const std::string& name);

// save_requests.cc
Result<Json> BeginSaveRequest(const Json& request);
Result<Json> JoinSaveRequest(const Json& request);
Result<Json> CommitSaveRequest(const Json& request);
Result<Json> EndSaveRequest(const Json& request);
Result<Json> BeginPartRequest(const Json& request);
Result<Json> CommitPartRequest(const Json& request);
Result<Json> EndPartRequest(const Json& request);
Result<Json> RecoverRequest(const Json& request);
// merge_requests.cc
Result<Json> MergeRequest(const Json& request);
Result<Json> MergeBeginRequest(const Json& request);
Result<Json> MergePartRequest(const Json& request);
Result<Json> MergeCommitRequest(const Json& request);
// job_requests.cc
Result<Json> JobCreateRequest(const Json& request);
Result<Json> JobPollRequest(const Json& request);
Result<Json> JobCancelRequest(const Json& request);
Result<Json> JobFreeRequest(const Json& request);

}  // namespace torch_ckpt::capi
