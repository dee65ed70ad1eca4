// Requests about a checkpoint that is there: open, close, describe, verify.
#include "capi/checkpoints.h"
#include "engine/stored_box.h"
#include "engine/verify_job.h"

namespace torch_ckpt::capi {
namespace {

// Every box that is stored of a tensor, once.
Result<Json> PlacementsJson(const Checkpoint& checkpoint, uint32_t entry) {
  const CatalogEntry& e = checkpoint.catalog().entries()[entry];
  Json boxes = Json::array();
  TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                      checkpoint.Placements(entry));
  for (const Placement& p : placements) {
    if (p.role == PlacementRole::kReplica) continue;
    // Of a range each box has its own first byte.
    TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                        StoredBoxes(e, p));
    const std::vector<Box> held = BoxesOf(p, e.shape);
    for (size_t i = 0; i < held.size(); ++i) {
      boxes.push_back({{"file", p.file},
                       {"offset", stored[i].base},
                       {"offsets", DimsJson(held[i].offsets)},
                       {"sizes", DimsJson(held[i].sizes)}});
    }
  }
  return boxes;
}

}  // namespace

Result<std::shared_ptr<const Checkpoint>> CheckpointOf(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "checkpoint", 0));
  if (id != 0) return Checkpoints().Find(id);
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  return OpenCheckpoint(path);
}

Result<Json> OpenRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(auto checkpoint, OpenCheckpoint(path));
  TC_ASSIGN_OR_RETURN(const int64_t id,
                      Checkpoints().Add(std::move(checkpoint)));
  return Json{{"checkpoint", id}};
}

// Jobs that still use it keep it.
Result<Json> CloseRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "checkpoint"));
  TC_RETURN_IF_ERROR(Checkpoints().Take(id).status());
  return Json::object();
}

Result<Json> DescribeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  if (GetBool(request, "check_files", false)) {
    TC_RETURN_IF_ERROR(checkpoint->CheckFiles());
  }
  const Catalog& catalog = checkpoint->catalog();
  Json names = Json::array(), kinds = Json::array(), dtypes = Json::array(),
       shapes = Json::array(), paths = Json::array(), parts = Json::array(),
       sizes = Json::array(), aliases = Json::object();
  const bool with_parts = GetBool(request, "placements", false);
  for (uint32_t i = 0; i < catalog.entries().size(); ++i) {
    const CatalogEntry& entry = catalog.entries()[i];
    const bool is_object = entry.kind == EntryKind::kObject;
    names.push_back(entry.name);
    kinds.push_back(static_cast<int>(entry.kind));
    dtypes.push_back(DtypeName(entry.dtype));
    shapes.push_back(DimsJson(entry.shape));
    const Result<uint64_t> size = ByteSize(entry.dtype, entry.shape);
    sizes.push_back(!is_object && size.ok() ? *size : 0);
    if (entry.kind == EntryKind::kAlias) {
      aliases[std::string(entry.name)] = entry.alias_of;
    }
    paths.push_back(entry.path.empty() ? Json() : Json(entry.path));
    if (is_object) {
      parts.push_back({{{"file", entry.file}}});
    } else if (with_parts) {
      TC_ASSIGN_OR_RETURN(parts.emplace_back(), PlacementsJson(*checkpoint, i));
    } else {
      parts.push_back(nullptr);
    }
  }
  Json files = Json::array();
  for (const ManifestFile& file : checkpoint->files()) {
    files.push_back({{"name", file.name},
                     {"role", RoleName(file.role)},
                     {"bytes", file.bytes}});
  }
  const Manifest* manifest = checkpoint->manifest();
  return Json{{"source", CheckpointSourceName(checkpoint->source())},
              {"save_id", checkpoint->save_id()},
              {"world_size", manifest ? Json(manifest->world_size) : Json()},
              {"hulls", checkpoint->hulls()},
              {"beside", checkpoint->beside()},
              {"files", std::move(files)},
              {"names", std::move(names)},
              {"kinds", std::move(kinds)},
              {"dtypes", std::move(dtypes)},
              {"shapes", std::move(shapes)},
              {"bytes", std::move(sizes)},
              {"paths", std::move(paths)},
              {"aliases", std::move(aliases)},
              {"placements", std::move(parts)}};
}

Result<Json> VerifyRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t workers, GetInt(request, "workers", 2));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  const VerifyOptions options{static_cast<int>(workers),
                              GetBool(request, "direct_io", true)};
  TC_ASSIGN_OR_RETURN(const VerifyReport report,
                      RunVerifyJob(checkpoint, options, job.get()));
  return Json{{"bytes", report.bytes}, {"files", report.files}};
}

}  // namespace torch_ckpt::capi
