#include "engine/open/derived.h"

#include <algorithm>
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
Result<Dtype> DtypeOf(const Checkpoint& checkpoint,
                      const DerivedTensor& derived) {
  const Catalog& catalog = checkpoint.catalog();
  std::optional<Dtype> dtype;
  for (const MappedPart& part : derived.parts) {
    if (part.stored.empty()) continue;
    const auto e = static_cast<uint32_t>(catalog.Find(part.stored));
    if (const UnreadTensor* unread = checkpoint.FindUnread(e)) {
      return Unsupported("'" + part.stored + "' " + unread->reason +
                         ", and is not read");
    }
    const Dtype own = catalog.entries()[e].dtype;
    if (derived.scaled) {
      dtype = kScaledAs;
      continue;
    }
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

// Puts together a catalog with these tensors in place of those that they use.
class Deriver {
 public:
  explicit Deriver(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  Status Add(const std::string& name, const Dims& shape,
             std::vector<MappedPart> parts) {
    DerivedTensor derived{std::move(parts)};
    for (const MappedPart& part : derived.parts) {
      if (part.stored.empty()) continue;
      const int64_t e = checkpoint_.catalog().Find(part.stored);
      derived.scaled =
          derived.scaled || checkpoint_.FindScaled(static_cast<uint32_t>(e));
    }
    const Result<Dtype> dtype = DtypeOf(checkpoint_, derived);
    if (!dtype.ok()) return Status(dtype.status()).WithTensor(name);
    TC_RETURN_IF_ERROR(builder_.AddTensor(name, *dtype, shape).status());
    out_.derived[name] = std::move(derived);
    return {};
  }

  // `used`: what of the checkpoint is not there under its own name any more.
  // With `all` scales are not there without their codes either.
  Result<MappedCatalog> End(const std::set<std::string, std::less<>>& used,
                            bool all) {
    TC_RETURN_IF_ERROR(CheckScales(used, all));
    const std::vector<ManifestFile>& files = checkpoint_.files();
    const Status copied = checkpoint_.catalog().CopyTo(&builder_, used, files);
    if (!copied.ok()) {
      return InvalidArgument(
                 "is made by tensor_mapping, and the name of a stored tensor "
                 "that no pair has")
          .WithTensor(copied.tensor());
    }
    TC_ASSIGN_OR_RETURN(out_.catalog,
                        Catalog::From(std::move(builder_), files));
    return std::move(out_);
  }

 private:
  // Codes do not go where their scales would not find them.
  Status CheckScales(const std::set<std::string, std::less<>>& used,
                     bool all) const {
    const Catalog& catalog = checkpoint_.catalog();
    const std::vector<CatalogEntry>& entries = catalog.entries();
    for (uint32_t e = 0; e < entries.size(); ++e) {
      if (entries[e].kind == EntryKind::kObject) continue;
      if (checkpoint_.FindScaled(e)) continue;  // numbers
      const bool is_used = used.contains(entries[e].name);
      if (!is_used && !all) continue;
      for (const std::string& scales : ScalesOf(catalog, entries[e])) {
        if (used.contains(scales) == is_used) continue;
        return Unsupported(is_used
                               ? "is stored as codes, whose scales '" + scales +
                                     "' no pair of tensor_mapping has: make "
                                     "numbers of them, or map both"
                               : "is stored as codes that no pair of "
                                 "tensor_mapping has, and a pair has their "
                                 "scales '" +
                                     scales + "': map both")
            .WithTensor(std::string(entries[e].name));
      }
    }
    return {};
  }

  const Checkpoint& checkpoint_;
  CatalogBuilder builder_;
  MappedCatalog out_;
};

}  // namespace

Result<MappedCatalog> DeriveCatalog(const Checkpoint& checkpoint,
                                    const std::vector<MappingPair>& pairs,
                                    const std::vector<NativeTensor>& natives,
                                    const Numbers& numbers) {
  TC_ASSIGN_OR_RETURN(
      TensorMap map,
      MapTensors(pairs, natives, numbers, ShapesOf(checkpoint.catalog())));
  Deriver deriver(checkpoint);
  for (auto& [n, parts] : map.natives) {
    TC_RETURN_IF_ERROR(
        deriver.Add(natives[n].name, natives[n].shape, std::move(parts)));
  }
  std::set<std::string, std::less<>> used;
  for (const auto& [name, shape] : map.stored) used.insert(name);
  TC_ASSIGN_OR_RETURN(MappedCatalog out, deriver.End(used, false));
  out.partly = std::move(map.partly);
  out.unmatched = std::move(map.unmatched);
  return out;
}

Result<MappedCatalog> DeriveNewCatalog(const Checkpoint& checkpoint,
                                       const std::vector<MappingPair>& pairs,
                                       const Numbers& numbers) {
  std::vector<NativeTensor> own;
  std::vector<std::string> names;
  for (const auto& [name, shape] : ShapesOf(checkpoint.catalog())) {
    own.push_back({name, shape});
    names.push_back(name);
  }
  TC_ASSIGN_OR_RETURN(const std::vector<MappingPair> turned,
                      TurnedFor(pairs, names));
  TC_ASSIGN_OR_RETURN(const TensorMap map, MapOntoNew(turned, own, numbers));
  // What each has of new ones is what these are made of.
  std::map<std::string, std::vector<MappedPart>, std::less<>> parts;
  std::set<std::string, std::less<>> used;
  for (const auto& [n, of_own] : map.natives) {
    used.insert(own[n].name);
    for (const MappedPart& part : of_own) {
      if (part.stored.empty()) continue;
      parts[part.stored].push_back(
          {own[n].name, {part.pair.to, part.pair.from}});
    }
  }
  Deriver deriver(checkpoint);
  for (const auto& [name, shape] : map.stored) {
    TC_RETURN_IF_ERROR(deriver.Add(name, shape, std::move(parts[name])));
  }
  TC_ASSIGN_OR_RETURN(MappedCatalog out, deriver.End(used, true));
  out.unmatched = map.unmatched;
  return out;
}

}  // namespace torch_ckpt
