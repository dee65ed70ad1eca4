// Runs: what the engine executes. A run is a loop nest of counts and strides
// around contiguous bytes, from one address space to another. Those that are
// made of a strided box may read bytes several times, in slices that overlap or
// repeat: whatever takes a Run takes these too.
#pragma once

#include <array>
#include <cstdint>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"

namespace torch_ckpt {

struct Run {
  uint64_t src = 0;  // byte offset (or address) of the first byte
  uint64_t dst = 0;
  uint64_t bytes = 0;  // contiguous bytes of the innermost copy; > 0
  int loops = 0;       // outermost first
  std::array<int64_t, kMaxDims> count{};       // each > 1
  std::array<int64_t, kMaxDims> src_stride{};  // in bytes
  std::array<int64_t, kMaxDims> dst_stride{};

  uint64_t Iterations() const;
  uint64_t TotalBytes() const { return Iterations() * bytes; }
  // Bytes of the source from the first to past the last one that is touched.
  uint64_t SrcSpan() const;
};

// The run without its outermost loop, at index 0 of that. REQUIRES: loops > 0.
Run InnerRun(const Run& run);

// A box with its bytes somewhere: `base` is the byte offset or address of the
// box's first element, `strides` are bytes per step of each dimension.
struct StridedBox {
  Box box;
  uint64_t base = 0;
  Dims strides;
};

// Row-major strides in bytes for a dense box of these sizes.
Dims DenseStrides(const Dims& sizes, int64_t unit_bytes);

// The overlap of two boxes; an empty Box (sizes of 0) when there is none.
Box Intersect(const Box& a, const Box& b);

// Copy of Intersect(src.box, dst.box) from src to dst, dimensions folded as
// far as both sides allow and in the order of src: loops by descending src
// stride, those of stride 0 (expanded tensors) outermost. False when the
// overlap is empty. Both boxes are in units of `unit_bytes` (format/dtype.h
// InUnits) and have the same rank; strides are not negative.
bool MakeRun(const StridedBox& src, const StridedBox& dst, int64_t unit_bytes,
             Run* out);

// Splits `run` into slices of SrcSpan() <= max_span, cutting the outermost
// loops first and contiguous bytes last; they come in ascending order of src
// for runs from MakeRun. Loops whose src stride is 0 stay whole in every slice.
// A max_span of 0 counts as 1. Calls fn(slice).
template <class Fn>
void SplitBySrcSpan(const Run& run, uint64_t max_span, Fn&& fn);

}  // namespace torch_ckpt

#include "plan/runs_inl.h"
