// Requests about a checkpoint that is there.
#include <array>
#include <cerrno>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "capi/requests.h"
#include "engine/commit/commit.h"
#include "engine/open/committed.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/stored_box.h"
#include "engine/read/verify_job.h"
#include "engine/upkeep/remove.h"
#include "format/names.h"
#include "json/held.h"
#include "os/directory.h"
#include "os/path.h"
#include "values/scaled.h"

namespace torch_ckpt::capi {
namespace {

Json ListedJson(const ManifestFile& file) {
  return {{"name", file.name},
          {"role", RoleName(file.role)},
          {"bytes", file.bytes}};
}

// Whether the elements are row-major, one after another.
bool IsDense(Dtype dtype, const StridedBox& stored) {
  const Dims& sizes = stored.box.sizes;
  const Dims dense = DenseStrides(sizes, DtypeUnit(dtype).bytes);
  for (int d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && stored.strides[d] != dense[d]) return false;
  }
  return true;
}

// Every box among the placements of a tensor, once.
Result<Json> PlacementsJson(const CatalogEntry& e,
                            const std::vector<Placement>& placements) {
  Json boxes = Json::array();
  for (const Placement& p : placements) {
    if (p.role == PlacementRole::kReplica) continue;
    // Of a range each box has its own first byte.
    TC_ASSIGN_OR_RETURN(const std::vector<StridedBox> stored,
                        StoredBoxes(e.dtype, e.shape, p));
    const std::vector<Box> held = BoxesOf(p, e.shape);
    for (size_t i = 0; i < held.size(); ++i) {
      Json& box =
          boxes.emplace_back(Json{{"file", p.file},
                                  {"offset", stored[i].base},
                                  {"offsets", DimsJson(held[i].offsets)},
                                  {"sizes", DimsJson(held[i].sizes)}});
      if (!IsDense(e.dtype, stored[i])) {
        box["strides"] = DimsJson(stored[i].strides);
      }
    }
  }
  return boxes;
}

// The dtypes and shapes that tensors have, each once: of thousands of tensors
// most are alike.
struct Types {
  // [dtype, shape, bytes], ...
  Json list = Json::array();

  size_t Find(const CatalogEntry& of, bool scaled) {
    CatalogEntry entry = of;
    if (scaled) entry.dtype = kScaledAs;
    key_.assign(1, static_cast<char>(entry.dtype));
    for (const int64_t size : entry.shape) {
      key_.append(reinterpret_cast<const char*>(&size), sizeof size);
    }
    const auto [it, fresh] = places_.try_emplace(key_, list.size());
    if (fresh) {
      const Result<uint64_t> bytes = ByteSize(entry.dtype, entry.shape);
      list.push_back({DtypeName(entry.dtype), DimsJson(entry.shape),
                      bytes.ok() ? *bytes : 0});
    }
    return it->second;
  }
  // Of a tensor that is not read, of whatever dtype.
  size_t Find(const UnreadTensor& unread) {
    const Json shape = unread.shape ? DimsJson(*unread.shape) : Json();
    const auto [it, fresh] = places_.try_emplace(
        "unread " + unread.dtype + " " + shape.dump(), list.size());
    if (fresh) list.push_back({unread.dtype, shape, 0});
    return it->second;
  }

 private:
  std::string key_;
  std::unordered_map<std::string, size_t> places_;
};

// How many tensors there are of each dtype and their bytes; tied ones are one.
class DtypeTotals {
 public:
  void Add(const CatalogEntry& entry, bool scaled) {
    if (entry.kind != EntryKind::kTensor) return;
    const Dtype dtype = scaled ? kScaledAs : entry.dtype;
    Total& total = totals_[static_cast<size_t>(dtype)];
    ++total.tensors;
    const Result<uint64_t> bytes = ByteSize(dtype, entry.shape);
    total.bytes += bytes.ok() ? *bytes : 0;
  }

  Json ToJson() const {
    Json out = Json::object();
    for (size_t i = 0; i < totals_.size(); ++i) {
      const auto& [tensors, bytes] = totals_[i];
      if (tensors == 0) continue;
      out[DtypeName(static_cast<Dtype>(i))] = {{"tensors", tensors},
                                               {"bytes", bytes}};
    }
    return out;
  }

 private:
  struct Total {
    uint64_t tensors = 0, bytes = 0;
  };
  std::array<Total, kDtypeCount> totals_;
};

// Of tensors that are not read, beside those of EntryKind.
constexpr char kUnreadKind = '3';

Json ManifestFilesJson(const Manifest& manifest) {
  Json files = Json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back(ListedJson(file));
  }
  return files;
}

// The same of the parts of a save without collectives, all there or not.
Result<Json> PartManifests(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const std::vector<Manifest> parts, ReadParts(directory));
  if (parts.empty()) {
    // One that is part of a checkpoint has none of its own.
    TC_ASSIGN_OR_RETURN(const auto above, FindAbove(directory));
    if (above) {
      return Json{{"manifests", Json::array()}, {"files", Json::array()}};
    }
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

}  // namespace

Result<Json> OpenRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(auto checkpoint, CheckpointOf(request));
  Json out = {{"notes", checkpoint->notes()}};
  TC_ASSIGN_OR_RETURN(out["checkpoint"],
                      Checkpoints().Add(std::move(checkpoint)));
  return out;
}

// The same checkpoint without the entries "names", under a number of its own.
Result<Json> WithoutRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      GetNames(request, "names"));
  TC_ASSIGN_OR_RETURN(auto left,
                      checkpoint->Without({names.begin(), names.end()}));
  TC_ASSIGN_OR_RETURN(const int64_t id, Checkpoints().Add(std::move(left)));
  return Json{{"checkpoint", id}};
}

// The same checkpoint with numbers for codes and scales, under a number of its
// own: see PairScales. "blocks" and "only" may be missing.
Result<Json> DequantizeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(auto checkpoint, CheckpointOf(request));
  ScaleOptions options;
  options.keeps_scales = GetBool(request, "keeps_scales", false);
  options.keeps_names = GetBool(request, "keeps_names", false);
  if (request.find("only") != request.end()) {
    TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        GetNames(request, "only"));
    options.only.emplace(names.begin(), names.end());
  }
  if (request.find("blocks") != request.end()) {
    TC_ASSIGN_OR_RETURN(const Json* sizes, GetList(request, "blocks"));
    Dims blocks;
    for (const Json& size : *sizes) {
      if (!size.is_number_integer() || size.get<int64_t>() < 1 ||
          size.get<int64_t>() > kMaxDimension || blocks.size() == 2) {
        return InvalidArgument("'blocks' are two sizes of at least 1");
      }
      blocks.push_back(size.get<int64_t>());
    }
    options.blocks = blocks;
  }
  TC_ASSIGN_OR_RETURN(const Checkpoint::Dequantized made,
                      Checkpoint::Dequantize(std::move(checkpoint), options));
  Json pairs = Json::array();
  for (const auto& [name, of] : made.checkpoint->scaled()) {
    pairs.push_back({name, of.codes, of.scales});
  }
  Json misfits = Json::array();
  for (const auto& [codes, scales, reason] : made.misfits) {
    misfits.push_back({codes, scales, reason});
  }
  Json out = {{"pairs", std::move(pairs)},
              {"misfits", std::move(misfits)},
              {"unscaled", made.unscaled},
              {"orphans", made.orphans}};
  TC_ASSIGN_OR_RETURN(out["checkpoint"], Checkpoints().Add(made.checkpoint));
  return out;
}

// Jobs that still use it keep it.
Result<Json> CloseRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "checkpoint"));
  TC_RETURN_IF_ERROR(Checkpoints().Take(id).status());
  return Json::object();
}

// The files of "checkpoint" stay open from one job to the next, until
// "release_files" with the number that this returns.
Result<Json> HoldFilesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  auto files = checkpoint->LendFiles(GetBool(request, "direct_io", true));
  TC_ASSIGN_OR_RETURN(const int64_t id, HeldFiles().Add(std::move(files)));
  return Json{{"files", id}};
}

Result<Json> ReleaseFilesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(request, "files"));
  TC_RETURN_IF_ERROR(HeldFiles().Take(id).status());
  return Json::object();
}

Result<Json> DescribeRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  if (GetBool(request, "check_files", false)) {
    TC_RETURN_IF_ERROR(checkpoint->file_set()->CheckFiles());
  }
  const bool whole = GetBool(request, "whole", false);
  // Of archives each is looked into.
  const auto opened = whole ? checkpoint->LendFiles(true) : nullptr;
  const bool tensors = GetBool(request, "tensors", true);
  const Catalog& catalog = checkpoint->catalog();
  const size_t count = catalog.entries().size();
  // Files are thousands, and who loads wants those of objects only.
  Json files = Json::array();
  std::vector<size_t> place(checkpoint->files().size());
  for (size_t i = 0; i < place.size(); ++i) {
    const ManifestFile& file = checkpoint->files()[i];
    if (!whole && file.role != FileRole::kObjects) continue;
    place[i] = files.size();
    files.push_back(ListedJson(file));
  }
  Types types;
  DtypeTotals dtypes;
  size_t tensor_count = 0;
  std::vector<std::string_view> names;
  std::string kinds;
  std::vector<size_t> type_of;
  Json paths = Json::array(), placements = Json::array(),
       holders = Json::array(), archived = Json::array(),
       common = Json::array(), scaled = Json::array(), aliases = Json::object(),
       unread_reasons = Json::object();
  for (uint32_t i = 0; i < count; ++i) {
    const CatalogEntry& entry = catalog.entries()[i];
    const UnreadTensor* unread = checkpoint->FindUnread(i);
    const bool is_scaled = checkpoint->MakesNumbers(i);
    if (!unread) dtypes.Add(entry, is_scaled);
    const bool is_tensor = unread || entry.kind != EntryKind::kObject;
    tensor_count += is_tensor;
    if (unread) unread_reasons[std::string(entry.name)] = unread->reason;
    if (is_scaled) scaled.push_back(entry.name);
    if (is_tensor && !tensors) continue;
    Json boxes;
    UnreadTensor refused;
    if (whole && is_tensor && !unread) {
      const auto stored = checkpoint->DescribedPlacements(i);
      if (stored.status().kind() == ErrorKind::kUnsupported) {
        // Seen in its archive only.
        refused = {DtypeName(entry.dtype), entry.shape,
                   stored.status().message()};
        unread = &refused;
      } else {
        TC_RETURN_IF_ERROR(stored.status());
        TC_ASSIGN_OR_RETURN(boxes, PlacementsJson(entry, *stored));
      }
    }
    names.push_back(entry.name);
    if (checkpoint->IsCommon(i)) common.push_back(entry.name);
    if (unread) {
      kinds += kUnreadKind;
      type_of.push_back(types.Find(*unread));
      unread_reasons[std::string(entry.name)] = unread->reason;
    } else {
      kinds += static_cast<char>('0' + static_cast<int>(entry.kind));
      type_of.push_back(types.Find(entry, is_scaled));
    }
    paths.push_back(entry.path.empty() ? Json() : Json(entry.path));
    if (unread) continue;
    if (entry.kind == EntryKind::kAlias) {
      aliases[std::string(entry.name)] = entry.alias_of;
    }
    if (!is_tensor) {
      if (entry.archived) archived.push_back(entry.name);
      holders.push_back(entry.archived && !whole ? Json()
                                                 : Json(place[entry.file]));
    } else if (whole && entry.kind == EntryKind::kAlias) {
      placements.emplace_back();  // of many boxes there may be many
    } else if (whole) {
      placements.push_back(std::move(boxes));
    }
  }
  Json metadata = Json::array();
  for (const auto& [name, text] : checkpoint->metadata()) {
    metadata.push_back({name, text});
  }
  const bool ours = checkpoint->source() == kManifestSource;
  return Json{{"metadata", std::move(metadata)},
              {"source", checkpoint->source()},
              {"format", checkpoint->format()},
              {"save_id", checkpoint->save_id()},
              {"world_size", ours ? Json(checkpoint->world_size()) : Json()},
              {"hulls", checkpoint->hulls()},
              {"beside", checkpoint->beside()},
              {"notes", checkpoint->notes()},
              {"files", std::move(files)},
              {"tensor_count", tensor_count},
              {"dtypes", dtypes.ToJson()},
              {"names", NamesJson(names)},
              {"kinds", std::move(kinds)},
              {"types", std::move(types.list)},
              {"type_of", std::move(type_of)},
              {"paths", std::move(paths)},
              {"aliases", std::move(aliases)},
              {"holders", std::move(holders)},
              {"archived", std::move(archived)},
              {"common", std::move(common)},
              {"scaled", std::move(scaled)},
              {"unread", std::move(unread_reasons)},
              {"placements", std::move(placements)}};
}

// In columns, since there may be a file for each tensor.
Result<Json> FilesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  std::vector<std::string_view> names, roles;
  std::vector<uint64_t> bytes;
  for (const ManifestFile& file : checkpoint->files()) {
    names.push_back(file.name);
    roles.push_back(RoleName(file.role));
    bytes.push_back(file.bytes);
  }
  return Json{{"names", NamesJson(names)},
              {"roles", NamesJson(roles)},
              {"bytes", std::move(bytes)}};
}

// Where the boxes of one tensor are, their files as paths that were opened and
// found to be those that are meant. With "described" they are for who looks and
// does not read: they need not be all of the tensor.
Result<Json> PlacementsRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::string name, GetString(request, "name"));
  const int64_t entry = checkpoint->catalog().Find(name);
  if (entry < 0) {
    return Incomplete("is not in the checkpoint")
        .WithFile(checkpoint->path())
        .WithTensor(name);
  }
  const auto number = static_cast<uint32_t>(entry);
  TC_ASSIGN_OR_RETURN(const std::vector<Placement> placements,
                      GetBool(request, "described", false)
                          ? checkpoint->DescribedPlacements(number)
                          : checkpoint->Placements(number));
  TC_ASSIGN_OR_RETURN(
      Json boxes,
      PlacementsJson(checkpoint->catalog().entries()[number], placements));
  std::vector<uint32_t> opened;
  for (Json& box : boxes) {
    TC_ASSIGN_OR_RETURN(const int64_t place, GetInt(box, "file"));
    const auto at = static_cast<uint32_t>(place);
    opened.push_back(at);
    TC_ASSIGN_OR_RETURN(const File file, checkpoint->file_set()->OpenFile(at));
    box["file"] = checkpoint->files()[at].name;
    box["path"] = file.path();
  }
  TC_RETURN_IF_ERROR(checkpoint->file_set()->CheckUnchanged(opened));
  return Json{{"placements", std::move(boxes)}};
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

Result<Json> VerifyRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const int64_t workers, GetInt(request, "workers", 2));
  TC_ASSIGN_OR_RETURN(const auto job, JobOf(request));
  TC_ASSIGN_OR_RETURN(const auto checkpoint, CheckpointOf(request));
  VerifyOptions options{static_cast<int>(workers),
                        GetBool(request, "direct_io", true)};
  TC_ASSIGN_OR_RETURN(options.share, GetInt(request, "share", 0));
  TC_ASSIGN_OR_RETURN(options.shares, GetInt(request, "shares", 1));
  if (options.share < 0 || options.share >= options.shares) {
    return InvalidArgument("there is no such share of the bytes");
  }
  TC_ASSIGN_OR_RETURN(const VerifyReport report,
                      RunVerifyJob(checkpoint, options, job.get()));
  return Json{{"bytes", report.bytes}, {"files", report.files}};
}

// Where saves into "path" stage, or have staged.
Result<Json> StagedPlacesRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const std::vector<StagedPlace> found, StagedPlaces(path));
  Json places = Json::array();
  for (const StagedPlace& place : found) {
    places.push_back({{"path", place.path},
                      {"in_use", place.in_use},
                      {"committed", place.committed}});
  }
  return Json{{"places", std::move(places)}};
}

Result<Json> RecoverRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const bool acted, RecoverDirectory(path));
  return Json{{"recovered", acted}};
}

Result<Json> RemoveRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::string path, GetString(request, "path"));
  TC_ASSIGN_OR_RETURN(const RemovedCheckpoint gone, RemoveCheckpoint(path));
  return Json{{"removed", gone.removed},
              {"left", gone.left},
              {"directory_removed", gone.directory},
              {"warnings", gone.warnings}};
}

}  // namespace torch_ckpt::capi
