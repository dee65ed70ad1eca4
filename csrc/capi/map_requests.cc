// Requests about mappings of tensors.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "capi/requests.h"
#include "engine/open/checkpoint.h"
#include "json/held.h"
#include "plan/tensor_map.h"

namespace torch_ckpt::capi {
namespace {

Result<std::vector<MappingPair>> PairsOf(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Json* given, GetList(request, "pairs"));
  std::vector<MappingPair> pairs;
  for (const Json& pair : *given) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() ||
        !pair[1].is_string()) {
      return InvalidArgument("'pairs' has two texts in each");
    }
    pairs.push_back({pair[0].get<std::string>(), pair[1].get<std::string>()});
  }
  return pairs;
}

Result<Numbers> NumbersOf(const Json& request) {
  Numbers numbers;
  const auto known = request.find("numbers");
  if (known == request.end() || !known->is_object()) return numbers;
  for (const auto& [name, value] : known->items()) {
    if (!value.is_number_integer()) {
      return InvalidArgument("'numbers' are integers");
    }
    numbers[name] = value.get<int64_t>();
  }
  return numbers;
}

Result<std::vector<NativeTensor>> TensorsOf(const Json& request,
                                            const char* names_field,
                                            const char* shapes_field) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      GetNames(request, names_field));
  std::vector<NativeTensor> tensors;
  for (size_t i = 0; i < names.size(); ++i) {
    TC_ASSIGN_OR_RETURN(const auto shape, GetDimsAt(request, shapes_field, i));
    if (!shape) {
      return InvalidArgument(std::string("'") + shapes_field +
                             "' has one for each name");
    }
    tensors.push_back({names[i], *shape});
  }
  return tensors;
}

// What the requests below have in common: "pairs" of views, and the tensors of
// a model as "names" and "shapes"; "numbers" by name.
struct Mapping {
  std::vector<MappingPair> pairs;
  std::vector<NativeTensor> natives;
  Numbers numbers;
};

Result<Mapping> MappingOf(const Json& request) {
  Mapping mapping;
  TC_ASSIGN_OR_RETURN(mapping.pairs, PairsOf(request));
  TC_ASSIGN_OR_RETURN(mapping.natives, TensorsOf(request, "names", "shapes"));
  TC_ASSIGN_OR_RETURN(mapping.numbers, NumbersOf(request));
  return mapping;
}

Json PartlyJson(const std::vector<PartlyUsed>& partly) {
  Json out = Json::array();
  for (const PartlyUsed& each : partly) {
    out.push_back({each.stored, each.native, each.elements, each.of});
  }
  return out;
}

// The positions in "pairs" of those that mean nothing are "unmatched".
Result<Json> MappedJson(const Checkpoint::Mapped& mapped) {
  Json out = {{"partly", PartlyJson(mapped.partly)},
              {"unmatched", mapped.unmatched}};
  TC_ASSIGN_OR_RETURN(out["checkpoint"], Checkpoints().Add(mapped.checkpoint));
  return out;
}

// A box of a native tensor in memory, whose strides and place are in elements.
struct HeldBox {
  size_t native;
  StridedBox box;
};

Result<std::vector<HeldBox>> HeldBoxes(const Json& request,
                                       const Mapping& mapping) {
  TC_ASSIGN_OR_RETURN(const Json* given, GetList(request, "boxes"));
  std::vector<HeldBox> boxes;
  for (const Json& each : *given) {
    TC_ASSIGN_OR_RETURN(const int64_t native, GetInt(each, "native"));
    HeldBox held{static_cast<size_t>(native), {}};
    const auto dims = [&](const char* field) -> Result<Dims> {
      const auto found = each.find(field);
      return ParseDims(found == each.end() ? Json() : *found);
    };
    TC_ASSIGN_OR_RETURN(held.box.box.offsets, dims("offsets"));
    TC_ASSIGN_OR_RETURN(held.box.box.sizes, dims("sizes"));
    TC_ASSIGN_OR_RETURN(held.box.strides, dims("strides"));
    if (native < 0 || held.native >= mapping.natives.size() ||
        !Inside(held.box.box, mapping.natives[held.native].shape) ||
        held.box.strides.size() != held.box.box.rank()) {
      return InvalidArgument("a box is in no native tensor");
    }
    boxes.push_back(std::move(held));
  }
  return boxes;
}

Result<TensorMap> MapOf(const Json& request, const Mapping& mapping) {
  if (request.find("stored_names") == request.end()) {
    return MapOntoNew(mapping.pairs, mapping.natives, mapping.numbers);
  }
  TC_ASSIGN_OR_RETURN(const std::vector<NativeTensor> given,
                      TensorsOf(request, "stored_names", "stored_shapes"));
  StoredShapes stored;
  for (const NativeTensor& each : given) stored[each.name] = each.shape;
  return MapTensors(mapping.pairs, mapping.natives, mapping.numbers, stored);
}

}  // namespace

// The same checkpoint with the tensors of a model in place of the stored ones
// that "pairs" say they are made of: DeriveCatalog.
Result<Json> MapRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const Mapping mapping, MappingOf(request));
  TC_ASSIGN_OR_RETURN(const Checkpoint::Mapped mapped,
                      Checkpoint::Map(std::move(checkpoint), mapping.pairs,
                                      mapping.natives, mapping.numbers));
  return MappedJson(mapped);
}

// The same checkpoint with the tensors that "pairs" make of its own:
// DeriveNewCatalog.
Result<Json> MapOntoNewRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(auto checkpoint, CheckpointOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<MappingPair> pairs, PairsOf(request));
  TC_ASSIGN_OR_RETURN(const Numbers numbers, NumbersOf(request));
  TC_ASSIGN_OR_RETURN(
      const Checkpoint::Mapped mapped,
      Checkpoint::MapOntoNew(std::move(checkpoint), pairs, numbers));
  return MappedJson(mapped);
}

// "boxes" that this process has in memory of the native tensors, as boxes of
// stored ones: those of "stored_names" and "stored_shapes", else ones that are
// to be made. "stored" has for each its name, its shape, the position of a
// native tensor that has some of it, and [box, its first element there,
// offsets, sizes, strides], ...; "zeros" such boxes that nothing is stored for;
// "natives" are the names of those that pairs name.
Result<Json> MapMemoryRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Mapping mapping, MappingOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<HeldBox> boxes,
                      HeldBoxes(request, mapping));
  TC_ASSIGN_OR_RETURN(const TensorMap map, MapOf(request, mapping));
  std::map<std::string_view, Json> held;
  Json zeros = Json::array();
  std::vector<StridedBox> mapped;
  for (size_t b = 0; b < boxes.size(); ++b) {
    const auto parts = map.natives.find(boxes[b].native);
    if (parts == map.natives.end()) continue;
    for (const MappedPart& part : parts->second) {
      mapped.clear();
      MapBox(part.pair, boxes[b].box, &mapped);
      Json* const into =
          part.stored.empty()
              ? &zeros
              : &held.try_emplace(part.stored, Json::array()).first->second;
      for (const StridedBox& box : mapped) {
        into->push_back({b, box.base, DimsJson(box.box.offsets),
                         DimsJson(box.box.sizes), DimsJson(box.strides)});
      }
    }
  }
  std::map<std::string_view, size_t> some;
  for (const auto& [native, parts] : map.natives) {
    for (const MappedPart& part : parts) some.try_emplace(part.stored, native);
  }
  Json stored = Json::array();
  for (const auto& [name, shape] : map.stored) {
    const auto found = held.find(name);
    stored.push_back(
        {name, DimsJson(shape), some[name],
         found == held.end() ? Json::array() : std::move(found->second)});
  }
  Json natives = Json::array();
  for (const auto& each : map.natives) {
    natives.push_back(mapping.natives[each.first].name);
  }
  return Json{{"stored", std::move(stored)},
              {"zeros", std::move(zeros)},
              {"natives", std::move(natives)},
              {"partly", PartlyJson(map.partly)},
              {"unmatched", map.unmatched}};
}

}  // namespace torch_ckpt::capi
