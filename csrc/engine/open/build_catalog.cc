#include "engine/open/build_catalog.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "engine/open/stored_box.h"
#include "plan/cover.h"

namespace torch_ckpt {
namespace {

// Entry `entry` of the header of file `file`.
struct Place {
  uint32_t file;
  uint32_t entry;
};

// The places of one tensor, in the order of files.
struct Tensor {
  std::string_view name;
  std::span<const Place> places;
};

// Adds every tensor of the files to `catalog`, which is empty, in the order in
// which it first stands there; the result is by its numbers. All places lie in
// one list, which outlives the result: most tensors have one.
std::vector<Tensor> GroupByName(const std::vector<NamedHeader>& files,
                                CatalogBuilder* catalog,
                                std::vector<Place>* places) {
  size_t count = 0;
  for (const NamedHeader& file : files) {
    count += file.file.header.tensors.size();
  }
  std::vector<uint32_t> ids;  // of the tensor of every place
  ids.reserve(count);
  std::vector<size_t> ends;  // of the places of every tensor
  for (const NamedHeader& file : files) {
    for (const SafetensorsEntry& entry : file.file.header.tensors) {
      const uint32_t id = catalog->FindOrAddTensor(entry.name);
      if (id == ends.size()) ends.push_back(0);
      ids.push_back(id);
      ++ends[id];
    }
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  places->resize(count);
  std::vector<Tensor> tensors;
  tensors.reserve(ends.size());
  size_t begin = 0;
  for (uint32_t id = 0; id < ends.size(); ++id) {
    tensors.push_back({catalog->entry(id).name,
                       std::span(*places).subspan(begin, ends[id] - begin)});
    begin = std::exchange(ends[id], begin);  // now where its next place goes
  }
  size_t at = 0;
  for (uint32_t f = 0; f < files.size(); ++f) {
    const size_t of_file = files[f].file.header.tensors.size();
    for (uint32_t i = 0; i < of_file; ++i) {
      (*places)[ends[ids[at++]]++] = {f, i};
    }
  }
  return tensors;
}

const SafetensorsEntry& EntryOf(const std::vector<NamedHeader>& files,
                                const Place& place) {
  return files[place.file].file.header.tensors[place.entry];
}

// Null where the tensor is whole there.
const ShardEntry* ShardOf(const std::vector<NamedHeader>& files,
                          const Place& place) {
  return files[place.file].file.sharding.Find(place.entry);
}

template <class Fn>
void ForEachBoxAt(const std::vector<NamedHeader>& files, const Place& place,
                  const Fn& fn) {
  ForEachBox(EntryOf(files, place).shape, ShardOf(files, place), fn);
}

// How many dimensions the tensor has, as that place says.
int DimsAt(const std::vector<NamedHeader>& files, const Place& place) {
  const ShardEntry* shard = ShardOf(files, place);
  const bool packed = shard && !shard->packed.empty();
  return packed ? shard->global_shape->size()
                : EntryOf(files, place).shape.size();
}

// What the file says of the tensor's global shape, null when nothing.
const Dims* SaidShape(const std::vector<NamedHeader>& files,
                      const Place& place) {
  const ShardEntry* shard = ShardOf(files, place);
  if (shard && shard->global_shape) return &*shard->global_shape;
  // Whole in a file of ours, or a file without sharding: the shape is known
  // and not just a hull.
  const ShardingInfo& sharding = files[place.file].file.sharding;
  if (!sharding.file_id.empty() || !sharding.has_sharding_info) {
    return &EntryOf(files, place).shape;
  }
  return nullptr;
}

Status Disagree(const std::vector<NamedHeader>& files, const Tensor& tensor,
                const Place& a, const Place& b, const std::string& what) {
  return Conflict(what + " in " + files[a.file].name + " and " +
                  files[b.file].name +
                  "; files of different saves stand side by side")
      .WithTensor(std::string(tensor.name));
}

// Sets `is_said` to whether a file says it.
Result<Dims> GlobalShape(const std::vector<NamedHeader>& files,
                         const Tensor& tensor, bool* is_said) {
  const Place& first_place = tensor.places[0];
  const SafetensorsEntry& first = EntryOf(files, first_place);
  const Place* said_by = nullptr;
  const Dims* said = nullptr;
  Dims hull = Dims::Filled(DimsAt(files, first_place), 0);
  for (const Place& place : tensor.places) {
    const SafetensorsEntry& entry = EntryOf(files, place);
    if (entry.dtype != first.dtype) {
      return Disagree(files, tensor, first_place, place,
                      std::string("is ") + DtypeName(first.dtype) + " and " +
                          DtypeName(entry.dtype));
    }
    if (DimsAt(files, place) != hull.size()) {
      return Disagree(files, tensor, first_place, place,
                      "has another number of dimensions");
    }
    if (const Dims* shape = SaidShape(files, place)) {
      if (said && !(*said == *shape)) {
        return Disagree(files, tensor, *said_by, place,
                        "has the global shape " + said->ToString() + " and " +
                            shape->ToString());
      }
      said = shape;
      said_by = &place;
    }
    ForEachBoxAt(files, place, [&](const Box& box) {
      for (int d = 0; d < hull.size(); ++d) {
        hull[d] = std::max(hull[d], box.offsets[d] + box.sizes[d]);
      }
    });
  }
  *is_said = said != nullptr;
  return said ? *said : hull;
}

}  // namespace

Result<CatalogBuilder> BuildCatalog(const std::vector<NamedHeader>& files,
                                    BoxProof proof,
                                    std::vector<std::string>* hulls) {
  CatalogBuilder catalog;
  std::vector<Place> places;
  const std::vector<Tensor> tensors = GroupByName(files, &catalog, &places);
  std::vector<Box> boxes;
  for (uint32_t id = 0; id < tensors.size(); ++id) {
    const Tensor& tensor = tensors[id];
    bool is_said = false;
    TC_ASSIGN_OR_RETURN(const Dims shape, GlobalShape(files, tensor, &is_said));
    if (!is_said && hulls) hulls->emplace_back(tensor.name);
    const Dtype dtype = EntryOf(files, tensor.places[0]).dtype;
    if (!is_said) {
      const Status size = ByteSize(dtype, shape).status();
      if (!size.ok()) {
        return Corrupt("the shape " + shape.ToString() +
                       " that its parts make is impossible: " + size.message())
            .WithTensor(std::string(tensor.name))
            .WithFile(files[tensor.places[0].file].name);
      }
    }
    catalog.SetType(id, dtype, shape);
    boxes.clear();
    for (const Place& place : tensor.places) {
      const SafetensorsEntry& in_file = EntryOf(files, place);
      const NamedHeader& file = files[place.file];
      Placement placement;
      placement.file = file.position;
      placement.offset = file.file.header.data_begin + in_file.begin;
      Status added;
      ForEachBoxAt(files, place, [&](const Box& box) {
        placement.box = box;
        if (added.ok()) added = catalog.AddPlacement(id, placement);
        // The header was checked: it has a size.
        placement.offset += ByteSize(dtype, box.sizes).value();
        boxes.push_back(box);
      });
      if (!added.ok()) return std::move(added).WithFile(file.name);
    }
    if (boxes.size() == 1 && boxes[0] == Box::Whole(shape)) continue;
    Status proved = proof == BoxProof::kTiling
                        ? ProveTiling(Box::Whole(shape), boxes)
                        : ProveDisjoint(boxes);
    if (!proved.ok()) {
      std::string where;
      for (const Place& place : tensor.places) {
        if (where.size() > 200) {
          where += ", ...";
          break;
        }
        where += (where.empty() ? "" : ", ") + files[place.file].name;
      }
      return Status(proved.kind(),
                    proved.message() + " (parts in " + where + ")")
          .WithTensor(std::string(tensor.name));
    }
  }
  return catalog;
}

Status ProveOwners(const Dims& shape, std::span<const Placement> placements) {
  std::vector<Box> owners;
  for (const Placement& placement : placements) {
    if (placement.role == PlacementRole::kReplica) continue;
    for (Box& box : BoxesOf(placement, shape)) owners.push_back(std::move(box));
  }
  const Box whole = Box::Whole(shape);
  if (owners.size() == 1 && owners[0] == whole) return {};
  return ProveTiling(whole, owners);
}

}  // namespace torch_ckpt
