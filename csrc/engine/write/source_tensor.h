// A tensor in the memory of this process or of one of its devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "plan/runs.h"

namespace torch_ckpt {

// `strides` are bytes per element step of each dimension. The caller keeps the
// memory alive and unchanged until the job has returned, and has waited for the
// kernels that fill it.
struct SourceTensor {
  const std::byte* data = nullptr;
  Dims sizes;
  Dims strides;
  int64_t element_bytes = 1;
  int device = -1;  // CUDA device, counted as torch does; -1: host memory

  uint64_t bytes() const;
  bool IsDense() const;  // row-major, without gaps
  // Bytes of memory from its first element to past its last one.
  uint64_t Span() const;
};

// The copies, one after another, that are bytes [from, from + bytes) of a
// source in row-major order: from its first byte on to byte 0. REQUIRES: both
// are multiples of its elements.
std::vector<Run> RunsOf(const SourceTensor& source, uint64_t from,
                        uint64_t bytes);

// Copies bytes [from, from + out.size()) of a source in host memory, in its
// row-major order, to `out`. Returns how many it has copied.
uint64_t Gather(const SourceTensor& source, uint64_t from, MutableByteSpan out);

}  // namespace torch_ckpt
