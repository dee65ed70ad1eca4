// Requests about plans, which touch no file.
#include "capi/requests.h"
#include "plan/cover.h"
#include "plan/share.h"

namespace torch_ckpt::capi {
namespace {

Result<std::vector<uint32_t>> Numbers(const Json& list) {
  if (!list.is_array()) return InvalidArgument("a list of numbers is due");
  std::vector<uint32_t> out;
  out.reserve(list.size());
  for (const Json& each : list) {
    TC_ASSIGN_OR_RETURN(const uint64_t number, ParseUnsigned(each));
    if (number > UINT32_MAX) return InvalidArgument("a number above 2^32");
    out.push_back(static_cast<uint32_t>(number));
  }
  return out;
}

Result<std::vector<uint32_t>> NumbersAt(const Json& request,
                                        const char* field) {
  TC_ASSIGN_OR_RETURN(const Json* list, GetList(request, field));
  return Numbers(*list);
}

}  // namespace

// In columns: of each box the position of its holders in "sets", its tensor,
// its bytes, and whether it is to stay near. Returns the rank of each.
Result<Json> ShareRequest(const Json& request) {
  ShareProblem problem;
  TC_ASSIGN_OR_RETURN(problem.nodes, NumbersAt(request, "nodes"));
  TC_ASSIGN_OR_RETURN(const Json* sets, GetList(request, "sets"));
  for (const Json& set : *sets) {
    TC_ASSIGN_OR_RETURN(std::vector<uint32_t> ranks, Numbers(set));
    problem.sets.push_back(std::move(ranks));
  }
  TC_ASSIGN_OR_RETURN(const auto holders, NumbersAt(request, "holders"));
  TC_ASSIGN_OR_RETURN(const auto tensors, NumbersAt(request, "tensors"));
  TC_ASSIGN_OR_RETURN(const auto near, NumbersAt(request, "near"));
  TC_ASSIGN_OR_RETURN(const Json* rows, GetList(request, "rows"));
  TC_ASSIGN_OR_RETURN(const Json* row_bytes, GetList(request, "row_bytes"));
  if (tensors.size() != holders.size() || near.size() != holders.size() ||
      rows->size() != holders.size() || row_bytes->size() != holders.size()) {
    return InvalidArgument("columns of different lengths");
  }
  for (size_t i = 0; i < holders.size(); ++i) {
    SharedBox& box = problem.boxes.emplace_back();
    box.holders = holders[i];
    box.tensor = tensors[i];
    box.near = near[i] != 0;
    TC_ASSIGN_OR_RETURN(box.rows, ParseUnsigned((*rows)[i]));
    TC_ASSIGN_OR_RETURN(box.row_bytes, ParseUnsigned((*row_bytes)[i]));
  }
  TC_ASSIGN_OR_RETURN(const auto shares, ShareOut(problem));
  Json columns = {{"boxes", Json::array()},
                  {"ranks", Json::array()},
                  {"begins", Json::array()},
                  {"ends", Json::array()}};
  for (const BoxShare& share : shares) {
    columns["boxes"].push_back(share.box);
    columns["ranks"].push_back(share.rank);
    columns["begins"].push_back(share.begin);
    columns["ends"].push_back(share.end);
  }
  return columns;
}

// Of boxes of one tensor, as lists of "offsets" and "sizes": the positions of
// two that overlap, or null.
Result<Json> FindOverlapRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Json* offsets, GetList(request, "offsets"));
  TC_ASSIGN_OR_RETURN(const Json* sizes, GetList(request, "sizes"));
  if (offsets->size() != sizes->size()) {
    return InvalidArgument("columns of different lengths");
  }
  std::vector<Box> boxes;
  boxes.reserve(sizes->size());
  for (size_t i = 0; i < sizes->size(); ++i) {
    Box& box = boxes.emplace_back();
    TC_ASSIGN_OR_RETURN(box.offsets, ParseDims((*offsets)[i]));
    TC_ASSIGN_OR_RETURN(box.sizes, ParseDims((*sizes)[i]));
  }
  TC_ASSIGN_OR_RETURN(const auto pair, FindOverlap(boxes));
  if (!pair) return Json(nullptr);
  return Json::array({pair->first, pair->second});
}

}  // namespace torch_ckpt::capi
