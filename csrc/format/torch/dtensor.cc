#include "format/torch/dtensor.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

// The arguments of torch._utils._rebuild_wrapper_subclass.
enum WrapperArgument : size_t { kWrapperClass, kWrapperDtype, kWrapperShape };
// How deep the sizes of a layout nest.
constexpr int kMaxNesting = 3;
// What looking for the attributes of one takes: some forty, each among up to a
// hundred.
constexpr uint64_t kSteps = 1000;

Status DTensorLacks(const char* what) {
  return Corrupt(std::string("the pickle has a DTensor without ") + what);
}

// The state is a pair: attributes, and those that DTensor has slots for.
const PickleValue* FindState(const PickleValue& state, const char* name) {
  // More would take long to search, and many tensors may share them.
  constexpr size_t kMost = 200;
  if (!state.Is(PickleKind::kTuple) || state.items().size() != 2) {
    return nullptr;
  }
  for (const PickleValue& part : state.items()) {
    if (!part.Is(PickleKind::kDict) || part.items().size() > kMost) continue;
    if (const PickleValue* found = FindKey(part.items(), name)) return found;
  }
  return nullptr;
}

Result<int64_t> ReadNumber(const PickleValue* value, const char* what) {
  if (!value || !value->Is(PickleKind::kInt)) return DTensorLacks(what);
  return value->integer();
}

Result<MeshPlacement> ReadPlacement(const PickleValue& value) {
  if (!value.Is(PickleKind::kObject)) return DTensorLacks("placements");
  if (const std::string_view name = UnknownName(value); !name.empty()) {
    return Unsupported("is a DTensor with the placement " + std::string(name) +
                       ", which is not known");
  }
  MeshPlacement out;
  switch (value.name()) {
    case PickleName::kReplicate:
      return out;
    case PickleName::kPartial:
      return Unsupported(
          "is a DTensor of partial sums, which are not in one file");
    case PickleName::kShard:
      out.kind = MeshPlacementKind::kShard;
      break;
    case PickleName::kStridedShard:
      out.kind = MeshPlacementKind::kStridedShard;
      break;
    default:
      return DTensorLacks("placements that are known");
  }
  TC_ASSIGN_OR_RETURN(
      const int64_t dim,
      ReadNumber(FindAttribute(value.object(), "dim"), "the dim of a shard"));
  if (dim < 0 || dim >= kMaxDims) return DTensorLacks("a dim that it has");
  out.dim = static_cast<int>(dim);
  if (out.kind == MeshPlacementKind::kStridedShard) {
    TC_ASSIGN_OR_RETURN(
        out.split_factor,
        ReadNumber(FindAttribute(value.object(), "split_factor"),
                   "a split factor"));
  }
  return out;
}

// A size of a mesh: a number, or numbers whose product it is.
Result<int64_t> ReadMeshSize(const PickleValue& value, int depth,
                             Budget* budget) {
  if (!budget->Step()) return budget->Over();
  if (value.Is(PickleKind::kInt) && value.integer() > 0) return value.integer();
  if (!value.Is(PickleKind::kTuple) || value.items().size() > kMaxDims ||
      depth == 0) {
    return DTensorLacks("a mesh size");
  }
  uint64_t product = 1;
  for (const PickleValue& item : value.items()) {
    TC_ASSIGN_OR_RETURN(const int64_t size,
                        ReadMeshSize(item, depth - 1, budget));
    const auto more = CheckedMul(product, static_cast<uint64_t>(size));
    if (!more || *more > static_cast<uint64_t>(INT32_MAX)) {
      return DTensorLacks("a mesh of possible size");
    }
    product = *more;
  }
  return static_cast<int64_t>(product);
}

Result<Dims> ReadMeshSizes(PickleValues sizes, Budget* budget) {
  if (sizes.size() > kMaxDims) return DTensorLacks("a mesh of few dimensions");
  Dims out;
  for (const PickleValue& size : sizes) {
    TC_ASSIGN_OR_RETURN(const int64_t each,
                        ReadMeshSize(size, kMaxNesting, budget));
    out.push_back(each);
  }
  return out;
}

// torch up to 2.8 keeps the ranks as a tensor of the mesh's shape, 2.9 a layout
// of nested sizes, and later ones a layout with one part for each dimension.
Result<Dims> ReadMesh(const PickleObject& mesh, Budget* budget) {
  if (const PickleValue* ranks = FindAttribute(mesh, "mesh");
      ranks && IsTorchTensor(*ranks)) {
    TC_ASSIGN_OR_RETURN(const TorchTensor tensor, ReadTorchTensor(*ranks));
    return tensor.shape;
  }
  const PickleValue* layout = FindAttribute(mesh, "_layout");
  if (!layout || !layout->Is(PickleKind::kObject, PickleName::kMeshLayout)) {
    return DTensorLacks("a mesh that is known");
  }
  if (const PickleValue* shape = FindAttribute(layout->object(), "shape")) {
    return ReadMeshSizes(
        shape->Is(PickleKind::kTuple) ? shape->items() : PickleValues(shape, 1),
        budget);
  }
  const PickleValue* axes = FindAttribute(layout->object(), "axes");
  if (!axes || !axes->Is(PickleKind::kTuple))
    return DTensorLacks("axes of its mesh");
  if (axes->items().size() > kMaxDims)
    return DTensorLacks("a mesh of few dimensions");
  Dims out;
  for (const PickleValue& axis : axes->items()) {
    const PickleValue* shape =
        axis.Is(PickleKind::kObject, PickleName::kMeshLayout)
            ? FindAttribute(axis.object(), "shape")
            : nullptr;
    if (!shape) return DTensorLacks("a mesh size");
    TC_ASSIGN_OR_RETURN(const int64_t size,
                        ReadMeshSize(*shape, kMaxNesting, budget));
    out.push_back(size);
  }
  return out;
}

// Whether the strided placements of a dimension say this order themselves, as
// those of FSDP over tensor parallelism do, of which torch 2.10 makes it: each
// stands behind those that split the dimension before it, into as many parts as
// its factor says.
bool IsOrderOfPlacements(const MeshRule& rule, int64_t tensor_dim,
                         PickleValues said) {
  if (rule.placements.size() != static_cast<size_t>(rule.mesh.size())) {
    return false;
  }
  std::vector<int> order;
  for (int m = rule.mesh.size() - 1; m >= 0; --m) {
    const MeshPlacement& placement = rule.placements[static_cast<size_t>(m)];
    if (placement.kind == MeshPlacementKind::kReplicate ||
        placement.dim != tensor_dim) {
      continue;
    }
    const bool strided = placement.kind == MeshPlacementKind::kStridedShard;
    const auto parts =
        static_cast<uint64_t>(strided ? placement.split_factor : 1);
    size_t at = 0;
    std::optional<uint64_t> before = 1;
    for (; at < order.size() && before && *before != parts; ++at) {
      before = CheckedMul(*before, static_cast<uint64_t>(rule.mesh[order[at]]));
    }
    if (before != parts) return false;
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(at), m);
  }
  return std::equal(order.begin(), order.end(), said.begin(), said.end(),
                    [](int dim, const PickleValue& value) {
                      return value.Is(PickleKind::kInt) &&
                             value.integer() == dim;
                    });
}

// Mesh dimensions that shard one dimension do so from left to right. Newer
// versions of torch say where they do not; of older ones, which have the mesh
// as a tensor, FSDP over tensor parallelism did not and does not say it.
Status CheckOrder(const PickleObject& spec, const PickleObject& mesh,
                  const MeshRule& rule) {
  const Status other = Unsupported(
      "is a DTensor whose mesh dimensions shard one of its own in another "
      "order than from left to right");
  const PickleValue* order = FindAttribute(spec, "shard_order");
  if (order && order->Is(PickleKind::kTuple)) {
    if (order->items().size() > kMaxDims) return other;
    for (const PickleValue& entry : order->items()) {
      // ShardOrderEntry(tensor_dim, mesh_dims)
      if (!entry.Is(PickleKind::kObject, PickleName::kShardOrderEntry) ||
          entry.object().arguments.items().size() != 2 ||
          !entry.object().arguments.items()[1].Is(PickleKind::kTuple)) {
        return other;
      }
      const PickleValues said = entry.object().arguments.items();
      int64_t last = -1;
      if (said[1].items().size() > rule.placements.size()) return other;
      bool ascends = true;
      for (const PickleValue& dim : said[1].items()) {
        if (!dim.Is(PickleKind::kInt) ||
            dim.integer() >= static_cast<int64_t>(rule.placements.size())) {
          return other;
        }
        ascends = ascends && dim.integer() > last;
        last = dim.integer();
      }
      if (!ascends &&
          (!said[0].Is(PickleKind::kInt) ||
           !IsOrderOfPlacements(rule, said[0].integer(), said[1].items()))) {
        return other;
      }
    }
    return {};
  }
  if (!FindAttribute(mesh, "mesh")) return {};
  std::array<int, kMaxDims> shards{};
  for (const MeshPlacement& placement : rule.placements) {
    if (placement.kind != MeshPlacementKind::kShard) continue;
    if (++shards[static_cast<size_t>(placement.dim)] > 1) {
      return Unsupported(
          "is a DTensor of which two mesh dimensions shard one of its own, "
          "saved by a torch that does not say in which order");
    }
  }
  return {};
}

}  // namespace

Result<TorchDTensor> ReadTorchDTensor(const TorchRebuild& rebuild,
                                      Budget* budget) {
  if (!budget->Step(kSteps)) return budget->Over();
  TorchDTensor out;
  if (rebuild.arguments.size() <= kWrapperShape || !rebuild.state) {
    return DTensorLacks("its arguments");
  }
  TC_ASSIGN_OR_RETURN(out.shape, ReadSize(rebuild.arguments[kWrapperShape]));
  const PickleValue* local = FindState(*rebuild.state, "_local_tensor");
  const PickleValue* spec = FindState(*rebuild.state, "_spec");
  if (!local || !IsTorchTensor(*local)) return DTensorLacks("its local tensor");
  if (!spec || !spec->Is(PickleKind::kObject, PickleName::kDTensorSpec)) {
    return DTensorLacks("its placements");
  }
  TC_ASSIGN_OR_RETURN(out.local, ReadTorchTensor(*local));
  if (DtypeUnit(out.local.dtype).elements > 1) {
    return Unsupported("is a DTensor of packed elements");
  }
  const PickleValue& dtype = rebuild.arguments[kWrapperDtype];
  if (!dtype.Is(PickleKind::kName, PickleName::kDtype) ||
      dtype.dtype() != out.local.dtype) {
    return DTensorLacks("the dtype of its local tensor");
  }
  const PickleValue* placements = FindAttribute(spec->object(), "placements");
  const PickleValue* mesh = FindAttribute(spec->object(), "mesh");
  if (!placements || (!placements->Is(PickleKind::kTuple) &&
                      !placements->Is(PickleKind::kList))) {
    return DTensorLacks("placements");
  }
  if (!mesh || !mesh->Is(PickleKind::kObject, PickleName::kDeviceMesh)) {
    return DTensorLacks("a mesh");
  }
  if (placements->items().size() > kMaxDims) {
    return Unsupported("is a DTensor on a mesh of more than " +
                       std::to_string(kMaxDims) + " dimensions");
  }
  for (const PickleValue& each : placements->items()) {
    TC_ASSIGN_OR_RETURN(const MeshPlacement placement, ReadPlacement(each));
    out.rule.placements.push_back(placement);
  }
  TC_ASSIGN_OR_RETURN(out.rule.mesh, ReadMesh(mesh->object(), budget));
  TC_RETURN_IF_ERROR(CheckOrder(spec->object(), mesh->object(), out.rule));
  const PickleValue* coordinate =
      FindAttribute(mesh->object(), "_coordinate_on_dim");
  if (!coordinate || coordinate->Is(PickleKind::kNone)) {
    return Unsupported(
        "is a DTensor, and its file does not say which rank's part it is");
  }
  TC_ASSIGN_OR_RETURN(out.coordinate, ReadSize(*coordinate));
  return out;
}

}  // namespace torch_ckpt
