#include <cerrno>

#include "capi/requests.h"
#include "capi/sessions.h"
#include "engine/commit.h"
#include "engine/merge_job.h"
#include "format/names.h"

namespace torch_ckpt::capi {
namespace {

Result<MergeOptions> ParseOptions(const Json& request) {
  MergeOptions options;
  const auto mapping = request.find("mapping");
  if (mapping != request.end() && mapping->is_object()) {
    options.mapping.emplace();
    for (const auto& [name, index] : mapping->items()) {
      if (!index.is_number_integer()) {
        return InvalidArgument("the mapping holds file indices")
            .WithTensor(name);
      }
      options.mapping->emplace_back(name, index.get<int64_t>());
    }
  }
  options.strict = GetBool(request, "strict", true);
  options.verify = GetBool(request, "verify", true);
  options.output = OutputOptionsOf(request);
  return options;
}

Result<MergePlan> ParsePlan(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string input, GetString(request, "input"));
  TC_ASSIGN_OR_RETURN(MergeOptions options, ParseOptions(request));
  TC_ASSIGN_OR_RETURN(auto checkpoint, OpenCheckpoint(input));
  const std::string expected = request.value("input_save_id", std::string());
  if (!expected.empty() && checkpoint->save_id() != expected) {
    return Conflict("was replaced since the merge began").WithFile(input);
  }
  std::vector<std::string> ids;
  TC_ASSIGN_OR_RETURN(const Json* given, GetList(request, "ids"));
  for (const Json& id : *given) {
    ids.push_back(id.is_string() ? id.get<std::string>() : "");
    if (!IsId(ids.back())) return InvalidArgument("a file id is malformed");
  }
  return MergePlan::Make(std::move(checkpoint), std::move(options),
                         std::move(ids));
}

struct Begun {
  std::unique_ptr<SaveSession> session;
  bool in_place = false;
};

Result<Begun> Begin(const Json& request, const MergePlan& plan) {
  TC_ASSIGN_OR_RETURN(const std::string output, GetString(request, "output"));
  TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(output, true));
  Begun begun;
  // By inode: another path may lead to the same directory.
  TC_ASSIGN_OR_RETURN(const Directory from,
                      Directory::Open(plan.checkpoint().path()));
  TC_ASSIGN_OR_RETURN(const FileInfo input, from.Stat());
  Result<Directory> to = Directory::Open(session.place().target);
  if (to.ok()) {
    TC_ASSIGN_OR_RETURN(const FileInfo output_info, to->Stat());
    begun.in_place = input.SameFile(output_info);
  } else if (to.status().sys_errno() != ENOENT) {
    return to.status();
  }
  begun.session = std::make_unique<SaveSession>(std::move(session));
  return begun;
}

Result<Json> Commit(const MergePlan& plan, SaveSession* session, bool in_place,
                    std::vector<std::vector<uint32_t>> digests) {
  CommitRequest commit;
  commit.write_index = true;
  // The shards stay beside their consolidation, as with stock.
  commit.keep_previous = in_place;
  for (size_t i = 0; i < plan.outputs().size(); ++i) {
    const OutputSpec& spec = plan.outputs()[i];
    commit.files.push_back(
        {spec.staged,
         {spec.name, spec.id, spec.role, spec.bytes, std::move(digests[i])}});
  }
  const Catalog& catalog = plan.checkpoint().catalog();
  for (const uint32_t e : plan.entries()) {
    const CatalogEntry& entry = catalog.entries()[e];
    commit.planned.emplace_back(entry.name, entry.path);
    if (entry.kind != EntryKind::kObject) continue;
    const Placement& p = catalog.placements(e)[0];
    commit.objects.push_back({entry.name, catalog.files()[p.file].name});
  }
  TC_ASSIGN_OR_RETURN(const Manifest manifest, CommitSave(session, commit));
  uint64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) bytes += file.bytes;
  return Json{{"save_id", manifest.save_id},
              {"files", plan.outputs().size()},
              {"hulls", plan.checkpoint().hulls()},
              {"bytes", bytes}};
}

Json Ids(const MergePlan& plan) {
  Json ids = Json::array();
  for (const OutputSpec& spec : plan.outputs()) ids.push_back(spec.id);
  return ids;
}

}  // namespace

Result<Json> MergeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request, JobKind::kMerge));
  TC_ASSIGN_OR_RETURN(const Begun begun, Begin(request, plan));
  TC_ASSIGN_OR_RETURN(auto digests,
                      RunMergeJob(plan, begun.session->directory(),
                                  /*existing=*/false, {}, job.get()));
  return Commit(plan, begun.session.get(), begun.in_place, std::move(digests));
}

// Over several ranks: the coordinator begins, every rank writes the pieces
// that are its part, the coordinator commits with the digests of all.
Result<Json> MergeBeginRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  TC_ASSIGN_OR_RETURN(Begun begun, Begin(request, plan));
  TC_RETURN_IF_ERROR(CreateOutputs(begun.session->directory(), plan.outputs()));
  Json out = {{"staging", begun.session->place().path},
              {"pieces", PieceCount(plan.outputs())},
              {"ids", Ids(plan)},
              {"in_place", begun.in_place},
              {"input_save_id", plan.checkpoint().save_id()}};
  out["session"] = KeepSession(std::move(begun.session));
  return out;
}

Result<Json> MergePartRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request, JobKind::kMerge));
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "staging"));
  TC_ASSIGN_OR_RETURN(const int64_t first, GetInt(request, "first"));
  TC_ASSIGN_OR_RETURN(const int64_t last, GetInt(request, "last"));
  Result<Directory> staging = Directory::Open(path);
  if (!staging.ok()) {
    return Incomplete(
               "the staging directory of the coordinator cannot be seen here: "
               "every rank must see the same file system under this path")
        .WithFile(path);
  }
  TC_ASSIGN_OR_RETURN(
      const auto digests,
      RunMergeJob(plan, *staging, /*existing=*/true,
                  {static_cast<uint64_t>(first), static_cast<uint64_t>(last)},
                  job.get()));
  Json out = Json::array();
  for (const auto& of_file : digests) out.push_back(CrcHex(of_file));
  return Json{{"crc32c", std::move(out)}};
}

Result<Json> MergeCommitRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const MergePlan plan, ParsePlan(request));
  // Every segment was written by one rank; the others hold 0 there.
  std::vector<std::vector<uint32_t>> digests(plan.outputs().size());
  TC_ASSIGN_OR_RETURN(const Json* parts, GetList(request, "parts"));
  for (const Json& part : *parts) {
    if (!part.is_array() || part.size() != digests.size()) {
      return InvalidArgument("a part does not fit the plan");
    }
    for (size_t f = 0; f < digests.size(); ++f) {
      TC_ASSIGN_OR_RETURN(const std::vector<uint32_t> crc,
                          ParseCrcHex(part[f].get<std::string>()));
      digests[f].resize(std::max(digests[f].size(), crc.size()));
      for (size_t i = 0; i < crc.size(); ++i) digests[f][i] |= crc[i];
    }
  }
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, TakeSession(id));
  Result<Json> result =
      Commit(plan, session.get(), GetBool(request, "in_place", false),
             std::move(digests));
  if (!result.ok()) ReturnSession(id, std::move(session));
  return result;
}

}  // namespace torch_ckpt::capi
