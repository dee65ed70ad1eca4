// The requests behind torch_ckpt_call, one function each; a file for each noun.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/commit/commit.h"
#include "json/fields.h"

namespace torch_ckpt::capi {

using Handler = Result<Json> (*)(const Json& request);

// Null for an unknown name.
Handler FindHandler(const std::string& op);

// checkpoint_requests.cc
Result<Json> OpenRequest(const Json& request);
Result<Json> WithoutRequest(const Json& request);
Result<Json> DequantizeRequest(const Json& request);
Result<Json> CloseRequest(const Json& request);
Result<Json> HoldFilesRequest(const Json& request);
Result<Json> ReleaseFilesRequest(const Json& request);
Result<Json> DescribeRequest(const Json& request);
Result<Json> FilesRequest(const Json& request);
Result<Json> PlacementsRequest(const Json& request);
Result<Json> ManifestRequest(const Json& request);
Result<Json> VerifyRequest(const Json& request);
Result<Json> StagedPlacesRequest(const Json& request);
Result<Json> RecoverRequest(const Json& request);
Result<Json> RemoveRequest(const Json& request);
// object_requests.cc
Result<Json> ArchiveRequest(const Json& request);
Result<Json> ReadObjectsRequest(const Json& request);
Result<Json> ReadArchiveRequest(const Json& request);
Result<Json> ObjectsFileRequest(const Json& request);
// plan_requests.cc
Result<Json> FindOverlapRequest(const Json& request);
Result<Json> ShareRequest(const Json& request);
// save_requests.cc
Result<Json> BeginSaveRequest(const Json& request);
Result<Json> JoinSaveRequest(const Json& request);
Result<Json> StageExtrasRequest(const Json& request);
Result<Json> CommitSaveRequest(const Json& request);
Result<Json> EndSaveRequest(const Json& request);
Result<Json> BeginPartRequest(const Json& request);
Result<Json> CommitPartRequest(const Json& request);
Result<Json> EndPartRequest(const Json& request);
// The paths of "extras", files that are to stand beside what is saved.
Result<std::vector<std::string>> ExtrasOf(const Json& request);
// final_requests.cc
Result<Json> CheckFinalRequest(const Json& request);
Result<Json> StageFinalRequest(const Json& request);
Result<Json> RefuseRingRequest(const Json& request);
// What the ranks of a save have written of its final files ("final" of the
// request) as files of its commit; none where the save has no such files.
Status AssembleFinals(const Json& request, const SaveSession& session,
                      CommitRequest* commit);
// merge_requests.cc
Result<Json> MergeRequest(const Json& request);
Result<Json> MergeBeginRequest(const Json& request);
Result<Json> MergeShareRequest(const Json& request);
Result<Json> MergeCommitRequest(const Json& request);
Result<Json> BeginArchivesRequest(const Json& request);
Result<Json> CommitArchivesRequest(const Json& request);
// map_requests.cc
Result<Json> MapRequest(const Json& request);
Result<Json> MapMemoryRequest(const Json& request);
Result<Json> MapOntoNewRequest(const Json& request);
Result<Json> NamedByPairsRequest(const Json& request);
// value_requests.cc
Result<Json> CompareRequest(const Json& request);
Result<Json> StatisticsRequest(const Json& request);
// job_requests.cc
Result<Json> JobCreateRequest(const Json& request);
Result<Json> JobPollRequest(const Json& request);
Result<Json> JobCancelRequest(const Json& request);
Result<Json> JobFreeRequest(const Json& request);
// memory_requests.cc
Result<Json> AdoptRequest(const Json& request);
Result<Json> ArenaRequest(const Json& request);
// probe_requests.cc
Result<Json> ProbeRequest(const Json& request);
// mesh_requests.cc
Result<Json> ExpandRuleRequest(const Json& request);

}  // namespace torch_ckpt::capi
