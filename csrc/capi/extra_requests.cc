#include "capi/requests.h"
#include "capi/sessions.h"
#include "engine/commit/staged_files.h"

namespace torch_ckpt::capi {

Status AddExtras(const Json& request, const Directory& staging,
                 CommitRequest* commit) {
  TC_ASSIGN_OR_RETURN(const Json* extras, GetList(request, "extras"));
  for (const Json& path : *extras) {
    if (!path.is_string()) return InvalidArgument("'extras' holds paths");
    TC_ASSIGN_OR_RETURN(CommitFile file,
                        AddStagedExtra(staging, path.get<std::string>()));
    commit->files.push_back(std::move(file));
  }
  return {};
}

Result<Json> StageExtrasRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  CommitRequest added;
  const Status status = AddExtras(request, session->directory(), &added);
  Saves().PutBack(id, std::move(session));
  TC_RETURN_IF_ERROR(status);
  Json files = Json::array();
  for (const CommitFile& file : added.files) {
    files.push_back({{"staged", file.staged},
                     {"name", file.file.name},
                     {"id", file.file.id},
                     {"role", RoleName(file.file.role)},
                     {"bytes", file.file.bytes},
                     {"crc32c", CrcHex(file.file.crc32c)}});
  }
  return Json{{"files", std::move(files)}};
}

}  // namespace torch_ckpt::capi
