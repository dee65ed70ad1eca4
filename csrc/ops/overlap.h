// Tensors that are one place in memory, in whole or in part.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "engine/write/source_tensor.h"

namespace torch_ckpt::ops {

// Whether several of its elements may be one place: always where they are, and
// for some odd strides of which torch's own check says no more either.
bool OverlapsItself(const SourceTensor& tensor);

// Whether some address lies between the first and the last byte of two of them,
// as it does of interleaved columns of a matrix, which share nothing.
bool SpansMeet(const std::vector<SourceTensor>& tensors);

// The numbers of two tensors that share a byte, if any do, or of two of odd
// strides of which it takes too long to prove that they share none.
// REQUIRES: none overlaps itself.
std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<SourceTensor>& tensors);

// Whether host memory between the first and the last byte of the tensor is in
// `region`.
bool ReachesInto(const SourceTensor& tensor, MutableByteSpan region);

}  // namespace torch_ckpt::ops
