// Codes and scales of any shapes: what is paired has scales for every box, and
// numbers are made of no byte beside them. The input says dtypes, shapes,
// names, blocks and a box.
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "engine/open/scaled.h"
#include "format/ours/catalog_builder.h"
#include "values/scaled.h"

using namespace torch_ckpt;

namespace {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int64_t UpTo(int64_t most) {
    return next_ < size_ ? data_[next_++] % (most + 1) : 0;
  }

 private:
  const uint8_t* const data_;
  const size_t size_;
  size_t next_ = 0;
};

Dims ShapeOf(Input* input) {
  constexpr int64_t kMostSize = 40;
  Dims shape;
  for (int64_t rank = input->UpTo(4); rank > 0; --rank) {
    shape.push_back(input->UpTo(kMostSize));
  }
  return shape;
}

constexpr Dtype kCodes[] = {Dtype::kF8E4M3, Dtype::kF8E5M2, Dtype::kF4,
                            Dtype::kU8,     Dtype::kI8,     Dtype::kBF16};
constexpr Dtype kScales[] = {Dtype::kF32,    Dtype::kBF16, Dtype::kF16,
                             Dtype::kF8E8M0, Dtype::kU8,   Dtype::kF64};
constexpr const char* kNames[] = {
    "m.weight_scale_inv", "m.weight_scale",  "m.scale",
    "m.qscale_weight",    "m.weight_scales", "other"};

bool Add(CatalogBuilder* builder, const std::string& name, Dtype dtype,
         const Dims& shape) {
  if (!ByteSize(dtype, shape).ok()) return false;
  const auto added = builder->AddTensor(name, dtype, shape);
  if (!added.ok()) return false;
  Placement placement;
  placement.box = Box::Whole(shape);
  return builder->AddPlacement(*added, placement).ok();
}

// A box of `shape` that is not empty; of its last dimension whole units.
std::optional<Box> BoxOf(Input* input, Dtype dtype, const Dims& shape) {
  const int64_t unit = DtypeUnit(dtype).elements;
  Box box = Box::Whole(shape);
  for (int d = 0; d < shape.size(); ++d) {
    const int64_t by = d == shape.size() - 1 ? unit : 1;
    if (shape[d] == 0 || shape[d] % by != 0) return std::nullopt;
    box.offsets[d] = input->UpTo(shape[d] / by - 1) * by;
    const int64_t left = (shape[d] - box.offsets[d]) / by;
    box.sizes[d] = (1 + input->UpTo(left - 1)) * by;
  }
  return box;
}

void Use(Input* input, const CatalogEntry& entry, const ScaledTensor& scaled) {
  const auto box = BoxOf(input, entry.dtype, entry.shape);
  if (!box) return;
  Scales scales(scaled.scale_dtype, entry.shape, scaled.blocks, *box);
  const Box stored = StoredScales(scaled, scales.held());
  if (!Inside(stored, scaled.stored)) abort();
  if (static_cast<size_t>(stored.Volume() * DtypeBits(scaled.scale_dtype)) /
          8 !=
      scales.bytes().size()) {
    abort();
  }
  if (!CanScale(entry.dtype, scaled.scale_dtype, Dtype::kF32)) abort();
  // Its first row.
  uint64_t first = 0;
  for (int d = 0; d < entry.shape.size(); ++d) {
    first = first * static_cast<uint64_t>(entry.shape[d]) +
            static_cast<uint64_t>(box->offsets[d]);
  }
  const auto count =
      entry.shape.empty() ? 1 : box->sizes[entry.shape.size() - 1];
  std::vector<std::byte> codes(
      static_cast<size_t>(count * DtypeBits(entry.dtype)) / 8);
  std::vector<std::byte> out(static_cast<size_t>(count) * 4);
  scales.Scale(entry.dtype, codes.data(), Dtype::kF32, out.data(), first,
               static_cast<uint64_t>(count));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const std::vector<ManifestFile> files = {
      {"a", "", FileRole::kData, uint64_t{1} << 40, {}}};
  const Dtype codes = kCodes[input.UpTo(5)], scale = kScales[input.UpTo(5)];
  const bool blocks = input.UpTo(1) == 1;
  const char* const name = kNames[input.UpTo(5)];
  ScaleOptions options;
  options.keeps_scales = input.UpTo(1) == 1;
  options.keeps_names = input.UpTo(1) == 1;
  if (input.UpTo(1) == 1) {
    options.blocks = Dims{1 + input.UpTo(40), 1 + input.UpTo(40)};
  }
  if (input.UpTo(3) == 3) options.only.emplace().insert("m.weight");
  CatalogBuilder builder;
  if (!Add(&builder, blocks ? "m.weight_blocks" : "m.weight", codes,
           ShapeOf(&input)) ||
      !Add(&builder, name, scale, ShapeOf(&input))) {
    return 0;
  }
  const auto catalog = Catalog::From(std::move(builder), files);
  if (!catalog.ok()) abort();
  const auto paired = PairScales(*catalog, files, options);
  if (!paired.ok()) return 0;
  for (const auto& [presented, scaled] : paired->scaled) {
    const int64_t entry = paired->catalog.Find(presented);
    if (entry < 0) abort();
    const auto number = static_cast<uint32_t>(entry);
    if (!paired->catalog.Placements(number, files).ok()) abort();
    Use(&input, paired->catalog.entries()[number], scaled);
  }
  return 0;
}
