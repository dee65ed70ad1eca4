// Elements of any dtype as numbers that can be computed with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/dtype.h"

namespace torch_ckpt {

// What holds the elements of a dtype.
enum class NumberKind : uint8_t {
  kNone,      // several elements share a byte: they are bits here
  kInteger,   // int64
  kUnsigned,  // uint64
  kReal,      // double
  kComplex,   // two doubles
};
NumberKind NumberKindOf(Dtype dtype);

// `count` elements at `from`, which needs no alignment; thread-safe.

// Exact, but for integers above 2^53, which are rounded. Of complex elements
// there are two numbers each. REQUIRES: not kNone.
void ToDoubles(Dtype dtype, const std::byte* from, size_t count, double* to);
// Exact; of kUnsigned the same bits. REQUIRES: one of these two. Anything but 0
// is a bool of 1.
void ToIntegers(Dtype dtype, const std::byte* from, size_t count, int64_t* to);

}  // namespace torch_ckpt
