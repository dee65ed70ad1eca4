// The 22 element types of safetensors, and the byte view of sub-byte ones.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/box.h"
#include "base/status.h"

namespace torch_ckpt {

enum class Dtype : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kDtypeCount = 22;

// The safetensors spelling: "BF16", "F8_E4M3", ...; never null.
const char* DtypeName(Dtype dtype);
std::optional<Dtype> DtypeFromName(std::string_view name);
int DtypeBits(Dtype dtype);  // 4, 6, 8, 16, 32 or 64

// Planning counts in units: the smallest whole number of elements that is a
// whole number of bytes (1 element from 8 bits on, 2 for F4, 4 for F6).
struct Unit {
  int64_t elements;
  int64_t bytes;
};
Unit DtypeUnit(Dtype dtype);

// Bytes of a tensor or box of these sizes; an error if the count overflows or
// is no whole number of bytes.
Result<uint64_t> ByteSize(Dtype dtype, const Dims& sizes);

// `box` of a tensor of `shape` counted in units: the last dimension divided by
// Unit::elements. A box that cuts a byte is an error (kUnsupported).
// For a sub-byte tensor whose last dimension is no whole number of units, only
// the whole tensor can be expressed: it comes back as one flat dimension.
struct UnitView {
  Dims shape;
  Box box;
  int64_t unit_bytes;
};
Result<UnitView> InUnits(Dtype dtype, const Dims& shape, const Box& box);

}  // namespace torch_ckpt
