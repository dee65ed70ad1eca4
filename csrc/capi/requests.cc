#include "capi/requests.h"

#include <map>

namespace torch_ckpt::capi {

Handler FindHandler(const std::string& op) {
  static const std::map<std::string, Handler> handlers = {
      {"adopt", AdoptRequest},
      {"archive_of", ArchiveRequest},
      {"arena", ArenaRequest},
      {"begin_archives", BeginArchivesRequest},
      {"begin_part", BeginPartRequest},
      {"begin_save", BeginSaveRequest},
      {"check_final", CheckFinalRequest},
      {"close", CloseRequest},
      {"commit_archives", CommitArchivesRequest},
      {"commit_part", CommitPartRequest},
      {"commit_save", CommitSaveRequest},
      {"compare", CompareRequest},
      {"dequantize", DequantizeRequest},
      {"describe", DescribeRequest},
      {"end_archives", EndSaveRequest},
      {"end_part", EndPartRequest},
      {"end_save", EndSaveRequest},
      {"expand_rule", ExpandRuleRequest},
      {"files", FilesRequest},
      {"find_overlap", FindOverlapRequest},
      {"hold_files", HoldFilesRequest},
      {"job_cancel", JobCancelRequest},
      {"job_create", JobCreateRequest},
      {"job_free", JobFreeRequest},
      {"job_poll", JobPollRequest},
      {"join_save", JoinSaveRequest},
      {"manifest", ManifestRequest},
      {"map", MapRequest},
      {"map_memory", MapMemoryRequest},
      {"map_onto_new", MapOntoNewRequest},
      {"named_by_pairs", NamedByPairsRequest},
      {"merge", MergeRequest},
      {"merge_begin", MergeBeginRequest},
      {"merge_commit", MergeCommitRequest},
      {"merge_share", MergeShareRequest},
      {"objects_file", ObjectsFileRequest},
      {"open", OpenRequest},
      {"placements", PlacementsRequest},
      {"probe", ProbeRequest},
      {"read_archive", ReadArchiveRequest},
      {"read_objects", ReadObjectsRequest},
      {"recover", RecoverRequest},
      {"refuse_ring", RefuseRingRequest},
      {"release_files", ReleaseFilesRequest},
      {"remove", RemoveRequest},
      {"share", ShareRequest},
      {"stage_extras", StageExtrasRequest},
      {"stage_final", StageFinalRequest},
      {"staged_places", StagedPlacesRequest},
      {"statistics", StatisticsRequest},
      {"verify", VerifyRequest},
      {"without", WithoutRequest},
  };
  const auto it = handlers.find(op);
  return it == handlers.end() ? nullptr : it->second;
}

}  // namespace torch_ckpt::capi
