#include "engine/open/scaled.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/checked.h"
#include "format/ours/catalog_builder.h"

namespace torch_ckpt {
namespace {

// What people call the scales of `w`, and of `a.weight`.
constexpr std::array<std::string_view, 2> kEnds = {"_scale_inv", "_scale"};
constexpr std::array<std::string_view, 2> kBeside = {"scale", "qscale_weight"};
constexpr std::string_view kWeight = "weight", kBlocks = "_blocks",
                           kBlockScales = "_scales";
constexpr int64_t kMxBlock = 32;      // elements that share a scale in MX
constexpr int64_t kMxBytes = 16;      // of these, in FP4
constexpr int64_t kUsualBlock = 128;  // of float8, in both dimensions

bool IsFloat8(Dtype dtype) {
  return dtype == Dtype::kF8E4M3 || dtype == Dtype::kF8E5M2;
}

// Float8 of which no numbers are made.
bool IsOtherFloat8(Dtype dtype) {
  return dtype == Dtype::kF8E4M3Fnuz || dtype == Dtype::kF8E5M2Fnuz;
}

bool IsByte(Dtype dtype) { return dtype == Dtype::kU8 || dtype == Dtype::kI8; }

int64_t DividedUp(int64_t size, int64_t by) { return (size + by - 1) / by; }

std::string Kind(const CatalogEntry& entry) {
  return std::string(DtypeName(entry.dtype)) + " of shape " +
         entry.shape.ToString();
}

// The names that the scales of `codes` may have.
std::vector<std::string> ScaleNames(std::string_view codes) {
  std::vector<std::string> names;
  for (const std::string_view end : kEnds) {
    names.push_back(std::string(codes) + std::string(end));
  }
  if (codes.ends_with(kWeight) &&
      (codes.size() == kWeight.size() ||
       codes[codes.size() - kWeight.size() - 1] == '.')) {
    const auto module = codes.substr(0, codes.size() - kWeight.size());
    for (const std::string_view name : kBeside) {
      names.push_back(std::string(module) + std::string(name));
    }
  }
  return names;
}

// Two tensors that belong together.
struct Pair {
  uint32_t codes, scales;
  std::string name;  // of what they are
  Dtype dtype;       // of the codes, as they are used
  Dims shape;        // in elements
  Dtype scale_dtype;
  Dims blocks;
};

// How a shape of scales divides one of codes; nullopt where it does not.
std::optional<Dims> OneFor(const Dims& shape, const Dims& stored) {
  if (stored.Product() != 1) return std::nullopt;
  Dims blocks = shape;
  for (int d = 0; d < blocks.size(); ++d) {
    blocks[d] = std::max<int64_t>(1, blocks[d]);
  }
  return blocks;
}

// One for each index of the first dimensions: rows, experts.
std::optional<Dims> OneForEach(const Dims& shape, const Dims& stored) {
  if (stored.size() > shape.size()) return std::nullopt;
  Dims blocks;
  int d = 0;
  for (; d < stored.size() && stored[d] == shape[d] && d < shape.size() - 1;
       ++d) {
    blocks.push_back(1);
  }
  if (d == 0) return std::nullopt;
  for (int rest = d; rest < stored.size(); ++rest) {
    if (stored[rest] != 1) return std::nullopt;
  }
  for (; d < shape.size(); ++d) {
    blocks.push_back(std::max<int64_t>(1, shape[d]));
  }
  return blocks;
}

// Of the last two dimensions, as many scales in all others.
std::optional<Dims> Grid(const Dims& shape, const Dims& stored,
                         const Dims& block) {
  const int rank = shape.size();
  if (stored.size() != rank || rank < 1) return std::nullopt;
  Dims blocks = Dims::Filled(rank, 1);
  for (int b = 0; b < std::min(rank, block.size()); ++b) {
    blocks[rank - 1 - b] = block[block.size() - 1 - b];
  }
  for (int d = 0; d < rank; ++d) {
    if (stored[d] != DividedUp(shape[d], blocks[d])) return std::nullopt;
  }
  return blocks;
}

class Pairing {
 public:
  Pairing(const Catalog& catalog, std::span<const ManifestFile> files,
          const ScaleOptions& options)
      : catalog_(catalog), files_(files), options_(options) {}

  Result<ScaledCatalog> Run() {
    TC_RETURN_IF_ERROR(FindPairs());
    TC_RETURN_IF_ERROR(CheckAsked());
    std::set<uint32_t> taken;  // as scales
    for (const Pair& pair : pairs_) taken.insert(pair.scales);
    FindOrphans(taken);
    if (pairs_.empty()) {
      out_.catalog = catalog_;
      return std::move(out_);
    }
    // What is an alias of codes becomes a tensor of these.
    std::set<std::string, std::less<>> gone;
    for (const Pair& pair : pairs_) {
      gone.emplace(entries()[pair.codes].name);
      if (!options_.keeps_scales) gone.emplace(entries()[pair.scales].name);
    }
    CatalogBuilder builder;
    for (const Pair& pair : pairs_) {
      TC_RETURN_IF_ERROR(Add(pair, &builder));
    }
    TC_RETURN_IF_ERROR(catalog_.CopyTo(&builder, gone, files_));
    TC_ASSIGN_OR_RETURN(out_.catalog,
                        Catalog::From(std::move(builder), files_));
    return std::move(out_);
  }

 private:
  const std::vector<CatalogEntry>& entries() const {
    return catalog_.entries();
  }

  bool IsAsked(std::string_view name) const {
    return !options_.only || options_.only->contains(name);
  }

  // The tensor of this name, which may be an alias.
  const CatalogEntry* FindTensor(const std::string& name,
                                 uint32_t* number) const {
    const int64_t found = catalog_.Find(name);
    if (found < 0) return nullptr;
    *number = static_cast<uint32_t>(found);
    const CatalogEntry& entry = entries()[*number];
    return entry.kind == EntryKind::kObject ? nullptr : &entry;
  }

  std::vector<uint32_t> FindScales(std::string_view codes) const {
    std::vector<uint32_t> found;
    for (const std::string& name : ScaleNames(codes)) {
      uint32_t number = 0;
      if (FindTensor(name, &number) != nullptr) found.push_back(number);
    }
    return found;
  }

  Status FindPairs() {
    for (uint32_t e = 0; e < entries().size(); ++e) {
      const CatalogEntry& entry = entries()[e];
      if (entry.kind == EntryKind::kObject) continue;
      const bool is_code = IsFloat8(entry.dtype) ||
                           IsOtherFloat8(entry.dtype) ||
                           entry.dtype == Dtype::kF4;
      if (!is_code && !IsByte(entry.dtype)) continue;
      if (entry.dtype == Dtype::kU8 && entry.name.ends_with(kBlocks)) {
        TC_RETURN_IF_ERROR(PairBlocks(e));
        continue;
      }
      std::vector<uint32_t> found = FindScales(entry.name);
      // Under another name they are the same codes.
      if (found.empty() && entry.kind == EntryKind::kAlias) {
        found = FindScales(entry.alias_of);
      }
      if (IsByte(entry.dtype) &&
          std::none_of(found.begin(), found.end(), [&](uint32_t s) {
            return entries()[s].dtype == Dtype::kF8E8M0;
          })) {
        continue;  // bytes
      }
      if (found.empty()) {
        out_.unscaled.emplace_back(entry.name);
        continue;
      }
      if (!IsAsked(entry.name)) continue;
      if (IsOtherFloat8(entry.dtype)) {
        TC_RETURN_IF_ERROR(
            Fit(e, found[0],
                Unsupported("is " + Kind(entry) + ", to be multiplied by '" +
                            std::string(entries()[found[0]].name) +
                            "', and no numbers are made of such codes")
                    .WithTensor(std::string(entry.name))));
        continue;
      }
      const Status paired =
          found.size() > 1 ? Twice(e, found) : PairWith(e, found[0]);
      TC_RETURN_IF_ERROR(Fit(e, found[0], paired));
    }
    return {};
  }

  Status Twice(uint32_t e, const std::vector<uint32_t>& found) const {
    return Unsupported("has scales twice: as '" +
                       std::string(entries()[found[0]].name) + "' and '" +
                       std::string(entries()[found[1]].name) + "'")
        .WithTensor(std::string(entries()[e].name));
  }

  // What does not fit is an error where it is asked for.
  Status Fit(uint32_t codes, uint32_t scales, const Status& paired) {
    if (paired.ok() || options_.only) return paired;
    out_.misfits.push_back({std::string(entries()[codes].name),
                            std::string(entries()[scales].name),
                            paired.message()});
    return {};
  }

  // x_blocks, with 16 bytes of two codes for each of x_scales.
  Status PairBlocks(uint32_t e) {
    const CatalogEntry& codes = entries()[e];
    std::string name(codes.name.substr(0, codes.name.size() - kBlocks.size()));
    uint32_t number = 0;
    const CatalogEntry* const scales =
        FindTensor(name + std::string(kBlockScales), &number);
    if (scales == nullptr) {
      out_.unscaled.emplace_back(codes.name);
      return {};
    }
    if (!IsAsked(codes.name)) return {};
    const int rank = codes.shape.size();
    bool fits =
        rank >= 2 && codes.shape[rank - 1] == kMxBytes &&
        scales->shape.size() == rank - 1 &&
        (scales->dtype == Dtype::kU8 || scales->dtype == Dtype::kF8E8M0);
    Dims shape;
    for (int d = 0; fits && d < rank - 1; ++d) {
      fits = scales->shape[d] == codes.shape[d];
      shape.push_back(codes.shape[d]);
    }
    if (!fits) {
      return Fit(e, number, DoNotFit(codes, *scales, "one scale for 16 bytes"));
    }
    shape[rank - 2] *= kMxBlock;
    Dims blocks = Dims::Filled(rank - 1, 1);
    blocks[rank - 2] = kMxBlock;
    if (options_.keeps_names) name = codes.name;
    pairs_.push_back({e, number, std::move(name), Dtype::kF4, shape,
                      Dtype::kF8E8M0, blocks});
    return {};
  }

  Status PairWith(uint32_t e, uint32_t s) {
    const CatalogEntry& codes = entries()[e];
    const CatalogEntry& scales = entries()[s];
    Pair pair{e,           s,           std::string(codes.name),
              codes.dtype, codes.shape, scales.dtype,
              {}};
    const bool packed = !IsFloat8(codes.dtype);
    if (IsByte(codes.dtype)) {
      if (codes.shape.empty()) {
        return DoNotFit(codes, scales, "two codes in a byte");
      }
      pair.dtype = Dtype::kF4;
      pair.shape[codes.shape.size() - 1] *= 2;
    }
    const bool powers = scales.dtype == Dtype::kF8E8M0 ||
                        (IsFloat8(codes.dtype) && scales.dtype == Dtype::kU8);
    if (powers) pair.scale_dtype = Dtype::kF8E8M0;
    const std::optional<Dims> blocks =
        BlocksOf(pair.shape, scales.shape, packed, powers);
    if (!blocks || !IsScale(pair.scale_dtype)) {
      return DoNotFit(codes, scales,
                      packed ? "one scale for 32 codes" : Known().c_str());
    }
    pair.blocks = *blocks;
    pairs_.push_back(std::move(pair));
    return {};
  }

  static bool IsScale(Dtype dtype) {
    return dtype == Dtype::kF32 || dtype == Dtype::kBF16 ||
           dtype == Dtype::kF16 || dtype == Dtype::kF8E8M0;
  }

  // Where several fit they are the same division.
  std::optional<Dims> BlocksOf(const Dims& shape, const Dims& stored,
                               bool packed, bool powers) const {
    std::optional<Dims> blocks;
    if (!packed) {
      blocks = OneFor(shape, stored);
      if (!blocks) blocks = OneForEach(shape, stored);
      if (!blocks) blocks = Grid(shape, stored, Usual());
    }
    if (!blocks && powers) blocks = Grid(shape, stored, {1, kMxBlock});
    return blocks;
  }

  Dims Usual() const {
    return options_.blocks ? *options_.blocks : Dims{kUsualBlock, kUsualBlock};
  }

  std::string Known() const {
    return "one scale, one for each row, or one for blocks of " +
           Usual().ToString();
  }

  static Status DoNotFit(const CatalogEntry& codes, const CatalogEntry& scales,
                         const char* known) {
    return Unsupported("is " + Kind(codes) + ", and its scales '" +
                       std::string(scales.name) + "' are " + Kind(scales) +
                       ", which is not " + known)
        .WithTensor(std::string(codes.name));
  }

  Status CheckAsked() const {
    if (!options_.only) return {};
    for (const std::string& name : *options_.only) {
      const bool found = std::any_of(
          pairs_.begin(), pairs_.end(),
          [&](const Pair& pair) { return entries()[pair.codes].name == name; });
      if (!found) {
        return InvalidArgument("has no scales in the checkpoint")
            .WithTensor(name);
      }
    }
    return {};
  }

  // What only scales are called.
  void FindOrphans(const std::set<uint32_t>& taken) {
    for (uint32_t e = 0; e < entries().size(); ++e) {
      const CatalogEntry& entry = entries()[e];
      if (entry.kind == EntryKind::kObject || taken.contains(e)) continue;
      for (const auto& [end, codes] : {std::pair(kEnds[0], std::string_view()),
                                       std::pair(kBlockScales, kBlocks)}) {
        if (!entry.name.ends_with(end)) continue;
        if (codes == kBlocks && entry.dtype != Dtype::kU8) continue;
        const std::string of(
            entry.name.substr(0, entry.name.size() - end.size()));
        if (catalog_.Find(of + std::string(codes)) < 0) {
          out_.orphans.emplace_back(entry.name);
        }
      }
    }
  }

  Status Add(const Pair& pair, CatalogBuilder* builder) {
    const CatalogEntry& codes = entries()[pair.codes];
    const CatalogEntry& scales = entries()[pair.scales];
    TC_ASSIGN_OR_RETURN(std::vector<Placement> placements,
                        catalog_.Placements(pair.codes, files_));
    for (Placement& placement : placements) {
      TC_RETURN_IF_ERROR(
          InCodes(codes, pair, &placement).WithTensor(std::string(codes.name)));
    }
    if (catalog_.Find(pair.name) >= 0 && pair.name != codes.name) {
      return Unsupported("stands beside '" + std::string(codes.name) +
                         "', which are codes of the same tensor")
          .WithTensor(pair.name);
    }
    TC_ASSIGN_OR_RETURN(const uint32_t added,
                        builder->AddTensor(pair.name, pair.dtype, pair.shape));
    if (pair.name == codes.name) {
      builder->SetPath(added, std::string(codes.path));
    }
    builder->SetPlacements(added, placements);
    out_.scaled[pair.name] = {std::string(codes.name), std::string(scales.name),
                              pair.scale_dtype, scales.shape, pair.blocks};
    return {};
  }

  // A placement of bytes as one of codes.
  static Status InCodes(const CatalogEntry& codes, const Pair& pair,
                        Placement* placement) {
    if (!IsByte(codes.dtype)) return {};
    if (placement->kind == PlacementKind::kArchive ||
        placement->kind == PlacementKind::kStridedBox) {
      return Unsupported(
          "is stored in an archive of torch.save; bytes of two codes are read "
          "from safetensors");
    }
    if (placement->kind == PlacementKind::kRange) {
      placement->begin *= 2;
      placement->end *= 2;
      return {};
    }
    Box& box = placement->box;
    const int last = box.rank() - 1;
    if (pair.shape.size() == box.rank()) {
      box.offsets[last] *= 2;
      box.sizes[last] *= 2;
      return {};
    }
    // The bytes of a group become part of the dimension before.
    if (box.offsets[last] != 0 || box.sizes[last] != kMxBytes) {
      return Unsupported("is stored in boxes that cut the bytes of a scale");
    }
    Box whole;
    for (int d = 0; d < last; ++d) {
      const int64_t by = d == last - 1 ? kMxBlock : 1;
      whole.offsets.push_back(box.offsets[d] * by);
      whole.sizes.push_back(box.sizes[d] * by);
    }
    box = whole;
    return {};
  }

  const Catalog& catalog_;
  const std::span<const ManifestFile> files_;
  const ScaleOptions& options_;
  std::vector<Pair> pairs_;
  ScaledCatalog out_;
};

}  // namespace

Box StoredScales(const ScaledTensor& scaled, const Box& held) {
  if (scaled.stored.Product() == 1) return Box::Whole(scaled.stored);
  // What dimensions it lacks have one scale.
  Box box;
  for (int d = 0; d < scaled.stored.size(); ++d) {
    box.offsets.push_back(held.offsets[d]);
    box.sizes.push_back(held.sizes[d]);
  }
  return box;
}

std::vector<std::string> ScalesOf(const Catalog& catalog,
                                  const CatalogEntry& codes) {
  if (!IsFloat8(codes.dtype) && !IsOtherFloat8(codes.dtype) &&
      codes.dtype != Dtype::kF4 && !IsByte(codes.dtype)) {
    return {};
  }
  std::vector<std::string> names = ScaleNames(codes.name);
  if (codes.kind == EntryKind::kAlias) {
    for (std::string& name : ScaleNames(codes.alias_of)) {
      names.push_back(std::move(name));
    }
  }
  if (codes.name.ends_with(kBlocks)) {
    const auto of = codes.name.substr(0, codes.name.size() - kBlocks.size());
    names.push_back(std::string(of) + std::string(kBlockScales));
  }
  std::erase_if(names, [&](const std::string& name) {
    const int64_t found = catalog.Find(name);
    return found < 0 || catalog.entries()[static_cast<size_t>(found)].kind ==
                            EntryKind::kObject;
  });
  return names;
}

Result<ScaledCatalog> PairScales(const Catalog& catalog,
                                 std::span<const ManifestFile> files,
                                 const ScaleOptions& options) {
  return Pairing(catalog, files, options).Run();
}

}  // namespace torch_ckpt
