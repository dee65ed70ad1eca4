#include "format/dtype.h"

#include <array>
#include <string>

#include "base/checked.h"

namespace torch_ckpt {
namespace {

struct DtypeInfo {
  const char* name;
  int bits;
};

// In the order of the enum.
constexpr std::array<DtypeInfo, kDtypeCount> kInfo = {{
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6},
    {"U8", 8},      {"I8", 8},          {"F8_E5M2", 8},     {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},        {"BF16", 16},       {"I32", 32},
    {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},
    {"I64", 64},    {"U64", 64},
}};

}  // namespace

const char* DtypeName(Dtype dtype) {
  return kInfo[static_cast<size_t>(dtype)].name;
}

int DtypeBits(Dtype dtype) { return kInfo[static_cast<size_t>(dtype)].bits; }

std::optional<Dtype> DtypeFromName(std::string_view name) {
  for (size_t i = 0; i < kInfo.size(); ++i) {
    if (name == kInfo[i].name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

Unit DtypeUnit(Dtype dtype) {
  const int bits = DtypeBits(dtype);
  if (bits == 4) return {2, 1};
  if (bits == 6) return {4, 3};
  return {1, bits / 8};
}

Result<uint64_t> ByteSize(Dtype dtype, const Dims& sizes) {
  // Zero sizes are left out of the product: whether a shape is accepted must
  // not depend on the order of its dimensions, and strides are products of
  // some of them.
  int64_t elements = 1;
  bool empty = false;
  for (int64_t size : sizes) {
    if (size < 0)
      return InvalidArgument("negative size in " + sizes.ToString());
    if (size == 0) {
      empty = true;
      continue;
    }
    const auto product = CheckedMul(elements, size);
    if (!product)
      return InvalidArgument("shape " + sizes.ToString() + " overflows");
    elements = *product;
  }
  const auto bits = CheckedMul(static_cast<uint64_t>(elements),
                               static_cast<uint64_t>(DtypeBits(dtype)));
  if (!bits) return InvalidArgument("shape " + sizes.ToString() + " overflows");
  if (empty) return uint64_t{0};
  if (*bits % 8 != 0) {
    return InvalidArgument("shape " + sizes.ToString() + " of " +
                           DtypeName(dtype) + " is no whole number of bytes");
  }
  return *bits / 8;
}

Result<UnitView> InUnits(Dtype dtype, const Dims& shape, const Box& box) {
  const auto bytes = ByteSize(dtype, shape);
  if (!bytes.ok()) return bytes.status();
  if (!Inside(box, shape)) {
    return InvalidArgument("box " + box.ToString() + " is not inside shape " +
                           shape.ToString());
  }
  const Unit unit = DtypeUnit(dtype);
  UnitView view{shape, box, unit.bytes};
  if (unit.elements == 1) return view;

  // A sub-byte tensor of rank 0 was refused by ByteSize.
  const int last = shape.size() - 1;
  if (shape[last] % unit.elements != 0) {
    if (!(box == Box::Whole(shape))) {
      return Unsupported("box " + box.ToString() + " of a " + DtypeName(dtype) +
                         " tensor of shape " + shape.ToString() +
                         " cuts a byte");
    }
    view.shape = {static_cast<int64_t>(*bytes) / unit.bytes};
    view.box = Box::Whole(view.shape);
    return view;
  }
  if (box.offsets[last] % unit.elements != 0 ||
      box.sizes[last] % unit.elements != 0) {
    return Unsupported("box " + box.ToString() + " of a " + DtypeName(dtype) +
                       " tensor cuts a byte");
  }
  view.shape[last] /= unit.elements;
  view.box.offsets[last] /= unit.elements;
  view.box.sizes[last] /= unit.elements;
  return view;
}

}  // namespace torch_ckpt
