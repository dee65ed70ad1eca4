// Requests about the final files of a save.
#include <algorithm>
#include <cerrno>

#include "capi/requests.h"
#include "engine/save/assemble_job.h"
#include "engine/save/ring_link.h"
#include "json/held.h"
#include "json/options.h"
#include "json/written.h"

namespace torch_ckpt::capi {
namespace {

// What tensors have in common: [dtype, shape, bands], of which each is the
// number of a ring or -1, a first row and an end.
Result<FinalTensor> ParseKind(const Json& item) {
  if (!item.is_array() || item.size() != 3 || !item[2].is_array()) {
    return InvalidArgument("a kind is a dtype, a shape and bands");
  }
  FinalTensor kind;
  TC_ASSIGN_OR_RETURN(kind.dtype, ParseDtype(item[0], ""));
  TC_ASSIGN_OR_RETURN(kind.shape, ParseDims(item[1]));
  for (const Json& band : item[2]) {
    if (!band.is_array() || band.size() != 3 ||
        !std::all_of(band.begin(), band.end(), [](const Json& number) {
          return number.is_number_integer();
        })) {
      return InvalidArgument("a band is a ring, a row and an end");
    }
    kind.bands.push_back({band[0].get<int64_t>(), band[1].get<int64_t>(),
                          band[2].get<int64_t>()});
  }
  return kind;
}

// The tensors that final files are to hold: their names, and the kind of each.
Result<std::vector<FinalTensor>> ParseTensors(const Json& request) {
  TC_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      GetNames(request, "names"));
  TC_ASSIGN_OR_RETURN(const Json* listed, GetList(request, "kinds"));
  TC_ASSIGN_OR_RETURN(const Json* kind_of, GetList(request, "kind_of"));
  if (kind_of->size() != names.size()) {
    return InvalidArgument("final files need the kind of each tensor");
  }
  std::vector<FinalTensor> tensors;
  tensors.reserve(names.size());
  std::vector<Result<FinalTensor>> kinds;
  for (const Json& item : *listed) kinds.push_back(ParseKind(item));
  for (size_t i = 0; i < names.size(); ++i) {
    const Json& number = (*kind_of)[i];
    if (!number.is_number_unsigned() ||
        number.get<uint64_t>() >= kinds.size()) {
      return InvalidArgument("the kind of a tensor is not listed");
    }
    const Result<FinalTensor>& kind = kinds[number.get<uint64_t>()];
    if (!kind.ok()) return kind.status().WithTensor(names[i]);
    tensors.push_back(*kind);
    tensors.back().name = std::move(names[i]);
  }
  return tensors;
}

}  // namespace

Result<Json> StageFinalRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "session"));
  TC_ASSIGN_OR_RETURN(const std::vector<FinalTensor> tensors,
                      ParseTensors(request));
  // Each a leader and then its senders.
  std::vector<FinalRing> rings;
  TC_ASSIGN_OR_RETURN(const Json* listed, GetList(request, "rings"));
  for (const Json& ranks : *listed) {
    if (!ranks.is_array() || ranks.empty()) {
      return InvalidArgument("a ring is a list of ranks");
    }
    std::vector<int64_t> members;
    for (const Json& rank : ranks) {
      if (!rank.is_number_unsigned()) return InvalidArgument("a rank is >= 0");
      members.push_back(rank.get<int64_t>());
    }
    rings.push_back({members[0], {members.begin() + 1, members.end()}});
  }
  TC_ASSIGN_OR_RETURN(const FileRule rule, FileRuleOf(request));
  TC_ASSIGN_OR_RETURN(const FileNaming naming, FileNamingOf(request));
  TC_ASSIGN_OR_RETURN(std::unique_ptr<SaveSession> session, Saves().Take(id));
  Result<FinalFiles> staged =
      StageFinalFiles(session->directory(), tensors, rule, naming,
                      GetBool(request, "sync", true), std::move(rings));
  const Status status =
      staged.ok() ? session->CheckNotHidden(NewFilesOf(*staged))
                  : ExplainGone(staged.status(), session->place().path);
  Saves().PutBack(id, std::move(session));
  TC_RETURN_IF_ERROR(status);
  return Json{{"files", staged->files.size()}};
}

// Of final files that a merge is going to make after a save of shards, as far
// as it is known what they are called: an index beside one file too. Under the
// lock that the merge will take, since a commit may wait there for its replay.
Result<Json> CheckFinalRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const FileNaming naming, FileNamingOf(request));
  const Status there = Directory::Open(path).status();
  if (there.sys_errno() == ENOENT || !naming.number_single) {
    return Json::object();
  }
  TC_RETURN_IF_ERROR(there);
  TC_ASSIGN_OR_RETURN(SaveSession session,
                      BeginSave(path, true, GetBool(request, "others", false)));
  TC_RETURN_IF_ERROR(session.CheckNotHidden(
      {{FinalFileName(1, 1, naming), IndexFileName(1, naming)}}));
  return Json{{"warnings", session.TakeWarnings()}};
}

Status AssembleFinals(const Json& request, const SaveSession& session,
                      CommitRequest* commit) {
  const auto reports = request.find("final");
  if (reports == request.end() || !reports->is_array()) return {};
  std::vector<RankFinals> ranks;
  for (const Json& item : *reports) {
    TC_ASSIGN_OR_RETURN(RankFinals rank, ParseFinals(item));
    ranks.push_back(std::move(rank));
  }
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const FinalFiles list,
                      ReadFinalFiles(session.directory()));
  TC_ASSIGN_OR_RETURN(const std::vector<StagedFile> files,
                      RunAssembleJob(session.directory(), list, ranks,
                                     OutputOptionsOf(request), job.get()));
  commit->files.insert(commit->files.end(), files.begin(), files.end());
  commit->index_name = list.index_name;
  return {};
}

Result<Json> RefuseRingRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "staging"));
  TC_ASSIGN_OR_RETURN(const int64_t rank, GetInt(request, "rank"));
  TC_ASSIGN_OR_RETURN(const Directory staging, Directory::Open(path));
  RefuseRing(staging, rank);
  return Json::object();
}

}  // namespace torch_ckpt::capi
