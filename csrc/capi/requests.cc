#include "capi/requests.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <map>
#include <memory>

#include "engine/open/checkpoint.h"
#include "engine/open/rank_manifests.h"
#include "engine/write/stage_job.h"
#include "format/names.h"
#include "os/directory.h"
#include "plan/mesh.h"
#include "runtime/adopted.h"
#include "runtime/arena.h"
#include "runtime/crc32c.h"

namespace torch_ckpt::capi {
namespace {

Json ManifestFilesJson(const Manifest& manifest) {
  Json files = Json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back({{"name", file.name},
                     {"role", RoleName(file.role)},
                     {"bytes", file.bytes}});
  }
  return files;
}

// The same of the parts of a save without collectives, all there or not.
Result<Json> PartManifests(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<Manifest> parts, ReadParts(directory));
  if (parts.empty()) {
    return Incomplete("holds no checkpoint of torch_ckpt: there is no " +
                      std::string(kManifestName))
        .WithFile(directory.path());
  }
  Json manifests = Json::array(), files = Json::array();
  for (const Manifest& part : parts) {
    manifests.push_back(
        PartManifestName(part.part->rank, part.part->world_size));
    for (Json& file : ManifestFilesJson(part)) files.push_back(std::move(file));
  }
  return Json{{"save_id", PartsSaveId(parts)},
              {"world_size", parts[0].world_size},
              {"manifests", std::move(manifests)},
              {"files", std::move(files)}};
}

// What the manifest names, without a look at those files: a checkpoint that is
// damaged can be removed too.
Result<Json> ManifestRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  Result<Directory> directory = Directory::Open(path);
  if (!directory.ok()) {
    if (directory.status().sys_errno() != ENOENT) return directory.status();
    return Incomplete("there is no such directory").WithFile(path);
  }
  const std::string name(kManifestName);
  Result<std::string> text = directory->ReadFile(name, kMaxManifestBytes);
  if (!text.ok()) {
    if (text.status().sys_errno() != ENOENT) return text.status();
    return PartManifests(*directory);
  }
  Result<Manifest> manifest = ParseManifest(AsBytes(*text));
  if (!manifest.ok()) {
    return manifest.status().WithFile(directory->Join(name));
  }
  return Json{{"save_id", manifest->save_id},
              {"world_size", manifest->world_size},
              {"manifests", {name}},
              {"files", ManifestFilesJson(*manifest)}};
}

Result<Json> ExpandRuleRequest(const Json& request) {
  const Json missing;
  const auto field = [&](const char* name) -> const Json& {
    const auto it = request.find(name);
    return it == request.end() ? missing : *it;
  };
  TC_ASSIGN_OR_RETURN(const Dims shape, GetDims(field("shape")));
  TC_ASSIGN_OR_RETURN(const Dims coordinate, GetDims(field("coordinate")));
  MeshRule rule;
  TC_ASSIGN_OR_RETURN(rule.mesh, GetDims(field("mesh")));
  for (const Json& item : field("placements")) {
    TC_ASSIGN_OR_RETURN(const std::string kind, GetString(item, "kind"));
    MeshPlacement placement;
    if (kind == "shard" || kind == "strided_shard") {
      TC_ASSIGN_OR_RETURN(const int64_t dim, GetInt(item, "dim"));
      placement.dim = static_cast<int>(dim);
      placement.kind = MeshPlacementKind::kShard;
      if (kind == "strided_shard") {
        placement.kind = MeshPlacementKind::kStridedShard;
        TC_ASSIGN_OR_RETURN(placement.split_factor,
                            GetInt(item, "split_factor"));
      }
    } else if (kind != "replicate") {
      return InvalidArgument("unknown placement '" + kind + "'");
    }
    rule.placements.push_back(placement);
  }
  TC_ASSIGN_OR_RETURN(const std::vector<LocalBox> boxes,
                      ExpandRule(shape, rule, coordinate));
  Json out = Json::array();
  for (const LocalBox& box : boxes) {
    out.push_back({{"offsets", DimsJson(box.box.offsets)},
                   {"sizes", DimsJson(box.box.sizes)},
                   {"local_offset", DimsJson(box.local_offset)}});
  }
  return Json{{"boxes", std::move(out)}};
}

Result<Json> ArenaRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t budget, GetInt(request, "budget", -1));
  Arena& arena =
      GetBool(request, "staging", false) ? Arena::Staging() : Arena::Process();
  if (budget >= 0) arena.SetBudget(static_cast<uint64_t>(budget));
  if (GetBool(request, "trim", false)) {
    arena.Trim();
    AdoptedMemory::Process().Trim();
  }
  TC_ASSIGN_OR_RETURN(const int64_t prepare, GetInt(request, "prepare", 0));
  if (prepare > 0) {
    StageOptions options;
    if (GetBool(request, "shared", false)) options.kind = MemoryKind::kShared;
    TC_ASSIGN_OR_RETURN(const int64_t workers,
                        GetInt(request, "workers", options.workers));
    options.workers = static_cast<int>(std::clamp<int64_t>(workers, 1, 256));
    TC_RETURN_IF_ERROR(
        PrepareRegion(static_cast<uint64_t>(prepare), options, &arena));
  }
  const ArenaStats stats = arena.Stats();
  return Json{{"budget", stats.budget},
              {"mapped", stats.mapped},
              {"leased", stats.leased},
              {"peak_mapped", stats.peak_mapped},
              {"crc32c", Crc32cImplementation()}};
}

// The region that a "stage" of another process has told of: leased until the
// job is freed, as one that is staged here.
Result<Json> AdoptRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "job"));
  TC_ASSIGN_OR_RETURN(const auto job, Jobs().Find(id));
  TC_ASSIGN_OR_RETURN(const int64_t fd, GetInt(request, "fd"));
  TC_ASSIGN_OR_RETURN(const int64_t offset, GetInt(request, "offset"));
  TC_ASSIGN_OR_RETURN(const int64_t bytes, GetInt(request, "bytes"));
  if (fd < 0 || fd > std::numeric_limits<int>::max() || offset < 0 ||
      bytes <= 0) {
    return InvalidArgument("that is no region of another process");
  }
  TC_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                      AdoptedMemory::Process().Adopt(
                          static_cast<int>(fd), static_cast<uint64_t>(offset),
                          static_cast<size_t>(bytes)));
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  job->Hold(std::move(memory));
  return Json{{"address", address}};
}

}  // namespace

Handler FindHandler(const std::string& op) {
  static const std::map<std::string, Handler> handlers = {
      {"adopt", AdoptRequest},
      {"arena", ArenaRequest},
      {"begin_part", BeginPartRequest},
      {"begin_save", BeginSaveRequest},
      {"check_final", CheckFinalRequest},
      {"close", CloseRequest},
      {"commit_part", CommitPartRequest},
      {"commit_save", CommitSaveRequest},
      {"describe", DescribeRequest},
      {"end_part", EndPartRequest},
      {"end_save", EndSaveRequest},
      {"expand_rule", ExpandRuleRequest},
      {"job_cancel", JobCancelRequest},
      {"job_create", JobCreateRequest},
      {"job_free", JobFreeRequest},
      {"job_poll", JobPollRequest},
      {"join_save", JoinSaveRequest},
      {"manifest", ManifestRequest},
      {"merge", MergeRequest},
      {"merge_begin", MergeBeginRequest},
      {"merge_commit", MergeCommitRequest},
      {"merge_part", MergePartRequest},
      {"open", OpenRequest},
      {"recover", RecoverRequest},
      {"remove", RemoveRequest},
      {"stage_extras", StageExtrasRequest},
      {"refuse_ring", RefuseRingRequest},
      {"stage_final", StageFinalRequest},
      {"verify", VerifyRequest},
  };
  const auto it = handlers.find(op);
  return it == handlers.end() ? nullptr : it->second;
}

}  // namespace torch_ckpt::capi
