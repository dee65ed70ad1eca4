// Requests about a save: its begin, its commit, its end.
#include <algorithm>

#include "capi/requests.h"
#include "engine/commit/commit.h"
#include "engine/commit/staged_files.h"
#include "format/json.h"
#include "json/held.h"
#include "json/options.h"
#include "json/written.h"

namespace torch_ckpt::capi {
namespace {

// The path that a name cut at its dots says, as JSON text.
std::string SplitPath(std::string_view name) {
  std::string path = "[";
  path.reserve(2 * name.size() + 4);
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    if (begin > 0) path += ',';
    AppendJsonString(&path, name.substr(begin, end - begin));
    begin = end + 1;
  }
  path += ']';
  return path;
}

Result<CommitRequest> ParseCommit(const Json& request) {
  CommitRequest commit;
  TC_ASSIGN_OR_RETURN(commit.world_size, GetInt(request, "world_size", 1));
  TC_ASSIGN_OR_RETURN(const Json* files, GetList(request, "files"));
  for (const Json& item : *files) {
    TC_ASSIGN_OR_RETURN(StagedFile file, ParseFile(item));
    commit.files.push_back(std::move(file));
  }
  TC_ASSIGN_OR_RETURN(const Json* objects, GetList(request, "objects"));
  for (const Json& item : *objects) {
    ObjectEntry object;
    TC_ASSIGN_OR_RETURN(object.name, GetString(item, "name"));
    TC_ASSIGN_OR_RETURN(object.file, GetString(item, "file"));
    commit.objects.push_back(std::move(object));
  }
  const auto aliases = request.find("aliases");
  if (aliases != request.end() && aliases->is_object()) {
    for (const auto& [name, of] : aliases->items()) {
      if (!of.is_string()) return InvalidArgument("'aliases' holds names");
      commit.aliases.emplace_back(name, of.get<std::string>());
    }
  }
  const auto metadata = request.find("metadata");
  if (metadata != request.end() && metadata->is_object()) {
    for (const auto& [name, text] : metadata->items()) {
      if (!text.is_string()) return InvalidArgument("'metadata' holds texts");
      commit.metadata.emplace_back(name, text.get<std::string>());
    }
  }
  TC_ASSIGN_OR_RETURN(std::vector<std::string> planned,
                      GetNames(request, "planned"));
  TC_ASSIGN_OR_RETURN(const std::string split, GetString(request, "split"));
  if (split.size() != planned.size()) {
    return InvalidArgument("'split' must say one thing of each planned name");
  }
  const auto paths = request.find("paths");
  const bool has_paths = paths != request.end() && paths->is_object();
  commit.planned.reserve(planned.size());
  for (size_t i = 0; i < planned.size(); ++i) {
    std::string path;
    if (split[i] == '1') {
      path = SplitPath(planned[i]);
    } else if (has_paths) {
      const auto given = paths->find(planned[i]);
      if (given != paths->end()) path = given->dump();
    }
    commit.planned.emplace_back(std::move(planned[i]), std::move(path));
  }
  return commit;
}

Json CommittedJson(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) bytes += file.bytes;
  return Json{{"save_id", manifest.save_id},
              {"files", manifest.files.size()},
              {"bytes", bytes}};
}

}  // namespace

Result<std::vector<std::string>> ExtrasOf(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Json* extras, GetList(request, "extras"));
  std::vector<std::string> paths;
  for (const Json& path : *extras) {
    if (!path.is_string()) return InvalidArgument("'extras' holds paths");
    paths.push_back(path.get<std::string>());
  }
  return paths;
}

Result<Json> BeginSaveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(SaveSession begun,
                      BeginSave(path, GetBool(request, "overwrite", true),
                                GetBool(request, "others", false)));
  NewFiles shards;
  TC_ASSIGN_OR_RETURN(shards.shard_ranks, GetInt(request, "shard_ranks", 0));
  TC_ASSIGN_OR_RETURN(shards.shards_in, SubdirectoryIn(request));
  if (shards.shard_ranks > 0) TC_RETURN_IF_ERROR(begun.CheckNotHidden(shards));
  auto session = std::make_unique<SaveSession>(std::move(begun));
  Json out = {{"staging", session->place().path},
              {"fresh", session->place().fresh},
              {"save_id", session->save_id()},
              {"warnings", session->TakeWarnings()}};
  TC_ASSIGN_OR_RETURN(out["session"], Saves().Add(std::move(session)));
  return out;
}

Result<Json> JoinSaveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const JoinedSave joined, JoinSave(path));
  return Json{{"staging", joined.staging}, {"save_id", joined.save_id}};
}

Result<Json> StageExtrasRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto extras, ExtrasOf(request));
  TC_ASSIGN_OR_RETURN(const std::string subdirectory, SubdirectoryIn(request));
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  CommitRequest added;
  const Status status = ExplainGone(
      AddStagedExtras(session->directory(), extras, subdirectory, &added),
      session->place().path);
  Saves().PutBack(id, std::move(session));
  TC_RETURN_IF_ERROR(status);
  Json files = Json::array();
  for (const StagedFile& file : added.files) {
    files.push_back(FileJson(file));
  }
  return Json{{"files", std::move(files)}};
}

Result<Json> CommitSaveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(CommitRequest commit, ParseCommit(request));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  const auto run = [&]() -> Result<Manifest> {
    TC_RETURN_IF_ERROR(AssembleFinals(request, *session, &commit));
    return CommitSave(session.get(), commit);
  };
  Result<Manifest> manifest = run();
  if (!manifest.ok()) {
    Saves().PutBack(id, std::move(session));
    return manifest.status();
  }
  Json out = CommittedJson(*manifest);
  out["warnings"] = session->TakeWarnings();
  return out;
}

Result<Json> EndSaveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  session.reset();
  return Json::object();
}

Result<Json> BeginPartRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  ManifestPart part;
  TC_ASSIGN_OR_RETURN(part.rank, GetInt(request, "rank"));
  TC_ASSIGN_OR_RETURN(part.world_size, GetInt(request, "world_size"));
  TC_ASSIGN_OR_RETURN(part.run_id, GetString(request, "run_id"));
  TC_ASSIGN_OR_RETURN(const int64_t sequence, GetInt(request, "sequence"));
  part.sequence = static_cast<uint64_t>(sequence);
  TC_ASSIGN_OR_RETURN(PartSession begun, BeginPart(path, part));
  auto session = std::make_unique<PartSession>(std::move(begun));
  Json out = {{"staging", session->path()}, {"save_id", session->save_id()}};
  TC_ASSIGN_OR_RETURN(out["session"], Parts().Add(std::move(session)));
  return out;
}

Result<Json> CommitPartRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(const CommitRequest commit, ParseCommit(request));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<PartSession> part, Parts().Take(id));
  Result<Manifest> manifest = CommitPart(part.get(), commit);
  if (!manifest.ok()) {
    Parts().PutBack(id, std::move(part));
    return manifest.status();
  }
  return CommittedJson(*manifest);
}

Result<Json> EndPartRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<PartSession> part, Parts().Take(id));
  part.reset();
  return Json::object();
}

}  // namespace torch_ckpt::capi
