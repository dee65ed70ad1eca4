#include "engine/build_catalog.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "plan/cover.h"

namespace torch_ckpt {
namespace {

struct Part {
  uint32_t file;
  const SafetensorsEntry* entry;
  const ShardEntry* shard;
  std::optional<Dims> global_shape;
};

struct Tensor {
  std::string_view name;
  std::vector<Part> parts;
};

Status Disagree(const std::vector<NamedHeader>& files, const Tensor& tensor,
                const Part& a, const Part& b, const std::string& what) {
  return Conflict(what + " in " + files[a.file].name + " and " +
                  files[b.file].name +
                  "; files of different saves stand side by side")
      .WithTensor(std::string(tensor.name));
}

Result<Dims> GlobalShape(const std::vector<NamedHeader>& files,
                         const Tensor& tensor) {
  const Part* said = nullptr;
  Dims hull = Dims::Filled(tensor.parts[0].entry->shape.size(), 0);
  for (const Part& part : tensor.parts) {
    const Part& first = tensor.parts[0];
    if (part.entry->dtype != first.entry->dtype) {
      return Disagree(files, tensor, first, part,
                      std::string("is ") + DtypeName(first.entry->dtype) +
                          " and " + DtypeName(part.entry->dtype));
    }
    if (part.entry->shape.size() != first.entry->shape.size()) {
      return Disagree(files, tensor, first, part,
                      "has another number of dimensions");
    }
    if (part.global_shape) {
      if (said && !(*said->global_shape == *part.global_shape)) {
        return Disagree(files, tensor, *said, part,
                        "has the global shape " +
                            said->global_shape->ToString() + " and " +
                            part.global_shape->ToString());
      }
      said = &part;
    }
    for (int d = 0; d < hull.size(); ++d) {
      hull[d] =
          std::max(hull[d], part.shard->offsets[d] + part.entry->shape[d]);
    }
  }
  return said ? *said->global_shape : hull;
}

}  // namespace

Result<Catalog> BuildCatalog(const std::vector<NamedHeader>& files,
                             BoxProof proof) {
  Catalog catalog;
  std::vector<Tensor> tensors;
  std::unordered_map<std::string_view, size_t> by_name;
  for (uint32_t f = 0; f < files.size(); ++f) {
    const FileHeader& file = files[f].file;
    catalog.AddFile(
        {files[f].name, file.sharding.file_id, file.header.file_bytes});
    for (size_t i = 0; i < file.header.tensors.size(); ++i) {
      const SafetensorsEntry& entry = file.header.tensors[i];
      const ShardEntry& shard = file.sharding.entries[i];
      Part part{f, &entry, &shard, shard.global_shape};
      // Whole in a file of ours, or a file without sharding: the shape is
      // known and not just a hull.
      if (!part.global_shape && (!file.sharding.file_id.empty() ||
                                 !file.sharding.has_sharding_info)) {
        part.global_shape = entry.shape;
      }
      auto [it, fresh] = by_name.try_emplace(entry.name, tensors.size());
      if (fresh) tensors.push_back({entry.name, {}});
      tensors[it->second].parts.push_back(part);
    }
  }
  for (const Tensor& tensor : tensors) {
    TC_ASSIGN_OR_RETURN(const Dims shape, GlobalShape(files, tensor));
    CatalogEntry entry;
    entry.name = std::string(tensor.name);
    entry.storage_dtype = entry.logical_dtype = tensor.parts[0].entry->dtype;
    entry.shape = shape;
    TC_ASSIGN_OR_RETURN(const uint32_t id, catalog.AddEntry(std::move(entry)));
    for (const Part& part : tensor.parts) {
      Placement placement;
      placement.file = part.file;
      placement.offset =
          files[part.file].file.header.data_begin + part.entry->begin;
      placement.box = {part.shard->offsets, part.entry->shape};
      Status added = catalog.AddPlacement(id, placement);
      if (!added.ok()) {
        return std::move(added)
            .WithTensor(std::string(tensor.name))
            .WithFile(files[part.file].name);
      }
    }
    const std::vector<Placement>& placements = catalog.placements(id);
    if (placements.size() == 1 && placements[0].box == Box::Whole(shape)) {
      continue;
    }
    std::vector<Box> boxes;
    for (const Placement& placement : placements) {
      boxes.push_back(placement.box);
    }
    Status proved = proof == BoxProof::kTiling
                        ? ProveTiling(Box::Whole(shape), boxes)
                        : ProveDisjoint(boxes);
    if (!proved.ok()) {
      std::string where;
      for (const Part& part : tensor.parts) {
        if (where.size() > 200) {
          where += ", ...";
          break;
        }
        where += (where.empty() ? "" : ", ") + files[part.file].name;
      }
      return Status(proved.kind(),
                    proved.message() + " (parts in " + where + ")")
          .WithTensor(std::string(tensor.name));
    }
  }
  return catalog;
}

}  // namespace torch_ckpt
