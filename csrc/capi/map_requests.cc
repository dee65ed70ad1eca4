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

// Boxes in memory, as flat numbers: of each the position of the held one that
// it is in, its first element there, how many dimensions it has, offsets, sizes
// and strides.
class BoxesJson {
 public:
  void Add(size_t held, const StridedBox& box) {
    numbers_.push_back(held);
    numbers_.push_back(box.base);
    numbers_.push_back(box.box.rank());
    for (const Dims* dims : {&box.box.offsets, &box.box.sizes, &box.strides}) {
      for (const int64_t each : *dims) numbers_.push_back(each);
    }
    ++count_;
  }
  size_t count() const { return count_; }
  void MoveTo(Json* out) {
    for (Json& number : numbers_) out->push_back(std::move(number));
  }

 private:
  std::vector<Json> numbers_;
  size_t count_ = 0;
};

// What is in memory of each stored tensor; "" is what is stored nowhere.
std::map<std::string_view, BoxesJson> MapBoxes(
    const TensorMap& map, const std::vector<HeldBox>& boxes) {
  std::map<std::string_view, BoxesJson> held;
  std::vector<StridedBox> mapped;
  for (size_t b = 0; b < boxes.size(); ++b) {
    const auto parts = map.natives.find(boxes[b].native);
    if (parts == map.natives.end()) continue;
    for (const MappedPart& part : parts->second) {
      mapped.clear();
      MapBox(part.pair, boxes[b].box, &mapped);
      if (mapped.empty()) continue;
      BoxesJson& into = held[part.stored];
      for (const StridedBox& box : mapped) into.Add(b, box);
    }
  }
  return held;
}

// Of tensors, in columns: their names and shapes.
class TensorsJson {
 public:
  void Add(std::string_view name, const Dims& shape) {
    names_.push_back(name);
    const auto [known, added] =
        numbers_.try_emplace(shape.ToString(), numbers_.size());
    if (added) shapes_.push_back(DimsJson(shape));
    shape_of_.push_back(known->second);
  }
  void MoveTo(Json* out) {
    (*out)["names"] = NamesJson(names_);
    (*out)["shapes"] = std::move(shapes_);
    (*out)["shape_of"] = std::move(shape_of_);
  }

 private:
  std::vector<std::string_view> names_;
  std::map<std::string, size_t> numbers_;
  Json shapes_ = Json::array();
  Json shape_of_ = Json::array();
};

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

// Those of "names" that the stored views of "pairs" mean, in lists: see
// NamedByPair.
Result<Json> NamedByPairsRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const std::vector<MappingPair> pairs, PairsOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      GetNames(request, "names"));
  TC_ASSIGN_OR_RETURN(const std::vector<NamedByPair> named,
                      NamedByPairs(pairs, names));
  Json out = Json::array();
  for (const NamedByPair& each : named) {
    out.push_back({each.name, each.pair, each.native});
  }
  return Json{{"named", std::move(out)}};
}

// "boxes" that this process has in memory of the native tensors, as boxes of
// stored ones: those of "stored_names" and "stored_shapes", else ones that are
// to be made. Of stored tensors there are "names", "shapes" and the position of
// each one's in these, "natives", a native tensor that has some of it (-1 where
// pairs say that none has), and how many "counts" of "boxes" it has, see
// BoxesJson. "zeros" are such boxes of native tensors that nothing is stored
// for; "mapped" are the positions of the native ones that pairs name.
Result<Json> MapMemoryRequest(const Json& request) {
  TC_ASSIGN_OR_RETURN(const Mapping mapping, MappingOf(request));
  TC_ASSIGN_OR_RETURN(const std::vector<HeldBox> boxes,
                      HeldBoxes(request, mapping));
  TC_ASSIGN_OR_RETURN(const TensorMap map, MapOf(request, mapping));
  std::map<std::string_view, BoxesJson> held = MapBoxes(map, boxes);
  std::map<std::string_view, size_t> some;
  Json is_mapped = Json::array();
  for (const auto& [native, parts] : map.natives) {
    is_mapped.push_back(native);
    for (const MappedPart& part : parts) some.try_emplace(part.stored, native);
  }
  TensorsJson tensors;
  Json natives = Json::array(), counts = natives, numbers = natives;
  for (const auto& [name, shape] : map.stored) {
    BoxesJson& of_tensor = held[name];
    tensors.Add(name, shape);
    const auto native = some.find(name);
    natives.push_back(native == some.end()
                          ? int64_t{-1}
                          : static_cast<int64_t>(native->second));
    counts.push_back(of_tensor.count());
    of_tensor.MoveTo(&numbers);
  }
  Json zeros = Json::array();
  held[""].MoveTo(&zeros);
  Json out{{"natives", std::move(natives)},  {"counts", std::move(counts)},
           {"boxes", std::move(numbers)},    {"zeros", std::move(zeros)},
           {"mapped", std::move(is_mapped)}, {"partly", PartlyJson(map.partly)},
           {"unmatched", map.unmatched}};
  tensors.MoveTo(&out);
  return out;
}

}  // namespace torch_ckpt::capi
