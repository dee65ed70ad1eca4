#include "engine/open/derived.h"

#include <optional>
#include <set>
#include <utility>

#include "engine/open/checkpoint.h"
#include "format/ours/catalog_builder.h"
#include "values/scaled.h"

namespace torch_ckpt {
namespace {

StoredShapes ShapesOf(const Catalog& catalog) {
  StoredShapes shapes;
  for (const CatalogEntry& entry : catalog.entries()) {
    if (entry.kind == EntryKind::kObject) continue;
    shapes.emplace_hint(shapes.end(), entry.name, entry.shape);
  }
  return shapes;
}

// The one dtype of all parts; of codes that in which numbers are made.
Result<Dtype> DtypeOf(const Catalog& catalog, const DerivedTensor& derived) {
  if (derived.scaled) return kScaledAs;
  std::optional<Dtype> dtype;
  for (const MappedPart& part : derived.parts) {
    if (part.stored.empty()) continue;
    const auto e = static_cast<size_t>(catalog.Find(part.stored));
    const Dtype own = catalog.entries()[e].dtype;
    if (DtypeBits(own) < 8) {
      return Unsupported("'" + part.stored + "' is " + DtypeName(own) +
                         ", whose elements are no bytes of their own");
    }
    if (dtype && *dtype != own) {
      return Unsupported("'" + part.stored + "' is " + DtypeName(own) +
                         ", other parts of it are " + DtypeName(*dtype));
    }
    dtype = own;
  }
  if (!dtype) return InvalidArgument("all of it is padding");
  return *dtype;
}

}  // namespace

Result<MappedCatalog> DeriveCatalog(const Checkpoint& checkpoint,
                                    const std::vector<MappingPair>& pairs,
                                    const std::vector<NativeTensor>& natives,
                                    const Numbers& numbers) {
  const Catalog& catalog = checkpoint.catalog();
  TC_ASSIGN_OR_RETURN(TensorMap map,
                      MapTensors(pairs, natives, numbers, ShapesOf(catalog)));
  MappedCatalog out;
  out.partly = std::move(map.partly);
  CatalogBuilder builder;
  for (auto& [n, parts] : map.natives) {
    DerivedTensor derived{std::move(parts)};
    for (const MappedPart& part : derived.parts) {
      const int64_t e = part.stored.empty() ? -1 : catalog.Find(part.stored);
      derived.scaled = derived.scaled ||
                       (e >= 0 && checkpoint.FindScaled(
                                      static_cast<uint32_t>(e)) != nullptr);
    }
    const Result<Dtype> dtype = DtypeOf(catalog, derived);
    if (!dtype.ok()) return Status(dtype.status()).WithTensor(natives[n].name);
    TC_RETURN_IF_ERROR(
        builder.AddTensor(natives[n].name, *dtype, natives[n].shape).status());
    out.derived[natives[n].name] = std::move(derived);
  }
  std::set<std::string, std::less<>> used;
  for (const auto& [name, shape] : map.stored) used.insert(name);
  const Status copied = catalog.CopyTo(&builder, used, checkpoint.files());
  if (!copied.ok()) {
    return InvalidArgument(
               "is a name of the model that pairs have, and of a stored tensor "
               "that they do not have")
        .WithTensor(copied.tensor());
  }
  TC_ASSIGN_OR_RETURN(out.catalog,
                      Catalog::From(std::move(builder), checkpoint.files()));
  return out;
}

}  // namespace torch_ckpt
