// The requests behind torch_ckpt_call, one function each.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "engine/commit/commit.h"
#include "engine/final/write_job.h"
#include "engine/write/output_files.h"
#include "plan/divide.h"
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
Result<std::shared_ptr<Job>> JobOf(const Json& request);
OutputOptions OutputOptionsOf(const Json& request);
// Of "stem" and "number_single".
Result<FileNaming> FileNamingOf(const Json& request);
// The dtype of tensor `name`, by what safetensors calls it.
Result<Dtype> DtypeOf(const Json& dtype, const std::string& name);
// Of "mapping", fqn to index of its file, or "max_bytes"; one file without
// them.
Result<FileRule> FileRuleOf(const Json& request);
std::string CrcHex(const std::vector<uint32_t>& crc32c);
Result<std::vector<uint32_t>> ParseCrcHex(const std::string& text);
// [[begin, end, digests], ...]
Json WrittenJson(const std::vector<WrittenRange>& ranges);
Result<std::vector<WrittenRange>> ParseWritten(const Json& ranges);
// Of "role".
Result<FileRole> GetRole(const Json& request);

// checkpoint_requests.cc
Result<Json> OpenRequest(const Json& request);
Result<Json> CloseRequest(const Json& request);
Result<Json> DescribeRequest(const Json& request);
Result<Json> VerifyRequest(const Json& request);
// save_requests.cc
Result<Json> BeginSaveRequest(const Json& request);
Result<Json> JoinSaveRequest(const Json& request);
Result<Json> CommitSaveRequest(const Json& request);
Result<Json> EndSaveRequest(const Json& request);
Result<Json> BeginPartRequest(const Json& request);
Result<Json> CommitPartRequest(const Json& request);
Result<Json> EndPartRequest(const Json& request);
Result<Json> RecoverRequest(const Json& request);
Result<Json> RemoveRequest(const Json& request);
// final_requests.cc
Result<Json> CheckFinalRequest(const Json& request);
Result<Json> StageFinalRequest(const Json& request);
Result<Json> RefuseRingRequest(const Json& request);
// What the ranks of a save have written of its final files ("final" of the
// request) as files of its commit; none where the save has no such files.
Status AssembleFinals(const Json& request, const SaveSession& session,
                      CommitRequest* commit);
// Of one rank: {"files": [{"file", "id", "ranges"}, ...], "parts": parts or
// null, "ring_bytes": int}
Json FinalsJson(const WrittenPlan& written);
// extra_requests.cc
Result<Json> StageExtrasRequest(const Json& request);
// Copies the files of "extras" into staging, for the commit.
Status AddExtras(const Json& request, const Directory& staging,
                 CommitRequest* commit);
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
