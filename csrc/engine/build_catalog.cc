#include "engine/build_catalog.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "plan/cover.h"

namespace torch_ckpt {
namespace {

// Entry `entry` of the header of file `file`.
struct Part {
  uint32_t file;
  uint32_t entry;
};

struct Tensor {
  std::string_view name;
  std::vector<Part> parts;
};

const SafetensorsEntry& EntryOf(const std::vector<NamedHeader>& files,
                                const Part& part) {
  return files[part.file].file.header.tensors[part.entry];
}

const ShardEntry& ShardOf(const std::vector<NamedHeader>& files,
                          const Part& part) {
  return files[part.file].file.sharding.entries[part.entry];
}

// What the file says of the tensor's global shape, null when nothing.
const Dims* SaidShape(const std::vector<NamedHeader>& files, const Part& part) {
  const ShardEntry& shard = ShardOf(files, part);
  if (shard.global_shape) return &*shard.global_shape;
  // Whole in a file of ours, or a file without sharding: the shape is known
  // and not just a hull.
  const ShardingInfo& sharding = files[part.file].file.sharding;
  if (!sharding.file_id.empty() || !sharding.has_sharding_info) {
    return &EntryOf(files, part).shape;
  }
  return nullptr;
}

Status Disagree(const std::vector<NamedHeader>& files, const Tensor& tensor,
                const Part& a, const Part& b, const std::string& what) {
  return Conflict(what + " in " + files[a.file].name + " and " +
                  files[b.file].name +
                  "; files of different saves stand side by side")
      .WithTensor(std::string(tensor.name));
}

Result<Dims> GlobalShape(const std::vector<NamedHeader>& files,
                         const Tensor& tensor) {
  const Part& first_part = tensor.parts[0];
  const SafetensorsEntry& first = EntryOf(files, first_part);
  const Part* said_by = nullptr;
  const Dims* said = nullptr;
  Dims hull = Dims::Filled(first.shape.size(), 0);
  for (const Part& part : tensor.parts) {
    const SafetensorsEntry& entry = EntryOf(files, part);
    if (entry.dtype != first.dtype) {
      return Disagree(files, tensor, first_part, part,
                      std::string("is ") + DtypeName(first.dtype) + " and " +
                          DtypeName(entry.dtype));
    }
    if (entry.shape.size() != first.shape.size()) {
      return Disagree(files, tensor, first_part, part,
                      "has another number of dimensions");
    }
    if (const Dims* shape = SaidShape(files, part)) {
      if (said && !(*said == *shape)) {
        return Disagree(files, tensor, *said_by, part,
                        "has the global shape " + said->ToString() + " and " +
                            shape->ToString());
      }
      said = shape;
      said_by = &part;
    }
    const Dims& offsets = ShardOf(files, part).offsets;
    for (int d = 0; d < hull.size(); ++d) {
      hull[d] = std::max(hull[d], offsets[d] + entry.shape[d]);
    }
  }
  return said ? *said : hull;
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
    if (f == 0) {
      tensors.reserve(file.header.tensors.size());
      by_name.reserve(file.header.tensors.size());
    }
    for (uint32_t i = 0; i < file.header.tensors.size(); ++i) {
      const std::string_view name = file.header.tensors[i].name;
      auto [it, fresh] = by_name.try_emplace(name, tensors.size());
      if (fresh) tensors.push_back({name, {}});
      tensors[it->second].parts.push_back({f, i});
    }
  }
  for (const Tensor& tensor : tensors) {
    TC_ASSIGN_OR_RETURN(const Dims shape, GlobalShape(files, tensor));
    CatalogEntry entry;
    entry.name = std::string(tensor.name);
    entry.storage_dtype = entry.logical_dtype =
        EntryOf(files, tensor.parts[0]).dtype;
    entry.shape = shape;
    TC_ASSIGN_OR_RETURN(const uint32_t id, catalog.AddEntry(std::move(entry)));
    catalog.ReservePlacements(id, tensor.parts.size());
    for (const Part& part : tensor.parts) {
      const SafetensorsEntry& in_file = EntryOf(files, part);
      Placement placement;
      placement.file = part.file;
      placement.offset =
          files[part.file].file.header.data_begin + in_file.begin;
      placement.box = {ShardOf(files, part).offsets, in_file.shape};
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
