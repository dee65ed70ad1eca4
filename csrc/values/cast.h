// Elements of one float type as elements of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/status.h"
#include "format/dtype.h"

namespace torch_ckpt {

// Whether elements of `from` can be cast to `to`: both are F64, F32, F16, BF16,
// F8_E4M3 or F8_E5M2.
bool CanCast(Dtype from, Dtype to);

// `count` elements at `source` to `target`, which does not overlap it; neither
// needs an alignment. The value of every element is that of `tensor.to(dtype)`
// in torch 2.13: rounded to nearest, ties to even, by way of float32; what is
// too large becomes infinite, or 448 in F8_E4M3, which has no infinity (NaN in
// older torches). A NaN stays a NaN, of whatever bits. Returns how many were
// lost: finite ones that round to more than the largest number of `to`, and
// infinite ones where it has no infinity. REQUIRES: CanCast. Thread-safe.
size_t CastElements(Dtype from, const std::byte* source, Dtype to,
                    std::byte* target, size_t count);

// The error of a cast that has lost so many values of a part of a tensor; ok
// for 0.
Status LostInCast(uint64_t count, Dtype from, Dtype to, std::string_view fqn);

// For tests: by the named implementation ("portable", "avx2", "avx512");
// nullopt where this CPU or build does not have it.
std::optional<size_t> CastElementsBy(std::string_view implementation,
                                     Dtype from, const std::byte* source,
                                     Dtype to, std::byte* target, size_t count);

}  // namespace torch_ckpt
