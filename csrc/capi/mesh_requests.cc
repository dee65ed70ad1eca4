// Requests about placements on a mesh of devices.
#include "capi/requests.h"
#include "plan/mesh.h"

namespace torch_ckpt::capi {

Result<Json> ExpandRuleRequest(const Json& request) {
  const Json missing;
  const auto field = [&](const char* name) -> const Json& {
    const auto it = request.find(name);
    return it == request.end() ? missing : *it;
  };
  TC_ASSIGN_OR_RETURN(const Dims shape, ParseDims(field("shape")));
  TC_ASSIGN_OR_RETURN(const Dims coordinate, ParseDims(field("coordinate")));
  MeshRule rule;
  TC_ASSIGN_OR_RETURN(rule.mesh, ParseDims(field("mesh")));
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
  // A rule of this process, and no stranger's.
  constexpr uint64_t kKeptAnyway = uint64_t{256} << 20;
  Budget budget("the placement rule", 0, kKeptAnyway);
  TC_ASSIGN_OR_RETURN(const std::vector<LocalBox> boxes,
                      ExpandRule(shape, rule, coordinate, &budget));
  Json out = Json::array();
  for (const LocalBox& box : boxes) {
    out.push_back({{"offsets", DimsJson(box.box.offsets)},
                   {"sizes", DimsJson(box.box.sizes)},
                   {"local_offset", DimsJson(box.local_offset)}});
  }
  return Json{{"boxes", std::move(out)}};
}

}  // namespace torch_ckpt::capi
