#include "plan/runs.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace torch_ckpt {
namespace {

struct Loop {
  int64_t count;
  int64_t src_stride;
  int64_t dst_stride;
};

// Outermost first: descending src stride, so that src is read ascending. A src
// stride of 0 (an expanded tensor) goes outermost: innermost it would break up
// the contiguous bytes.
bool Before(const Loop& a, const Loop& b) {
  const bool a_repeats = a.src_stride == 0, b_repeats = b.src_stride == 0;
  if (a_repeats != b_repeats) return a_repeats;
  if (a.src_stride != b.src_stride) return a.src_stride > b.src_stride;
  return a.dst_stride > b.dst_stride;
}

bool Folds(const Loop& outer, const Loop& inner) {
  return outer.src_stride == inner.src_stride * inner.count &&
         outer.dst_stride == inner.dst_stride * inner.count;
}

}  // namespace

uint64_t Run::Iterations() const {
  uint64_t n = 1;
  for (size_t l = 0; l < static_cast<size_t>(loops); ++l) {
    n *= static_cast<uint64_t>(count[l]);
  }
  return n;
}

Run InnerRun(const Run& run) {
  Run inner = run;
  --inner.loops;
  for (size_t i = 0; i < static_cast<size_t>(inner.loops); ++i) {
    inner.count[i] = run.count[i + 1];
    inner.src_stride[i] = run.src_stride[i + 1];
    inner.dst_stride[i] = run.dst_stride[i + 1];
  }
  return inner;
}

uint64_t Run::SrcSpan() const {
  uint64_t span = bytes;
  for (size_t l = 0; l < static_cast<size_t>(loops); ++l) {
    span += static_cast<uint64_t>((count[l] - 1) * src_stride[l]);
  }
  return span;
}

Dims DenseStrides(const Dims& sizes, int64_t unit_bytes) {
  Dims strides = Dims::Filled(sizes.size(), 0);
  // Unsigned: the strides of an empty box may wrap, and nobody uses them.
  uint64_t stride = static_cast<uint64_t>(unit_bytes);
  for (int d = sizes.size() - 1; d >= 0; --d) {
    strides[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(sizes[d], 1));
  }
  return strides;
}

Box Intersect(const Box& a, const Box& b) {
  const Box none = {a.offsets, Dims::Filled(a.rank(), 0)};
  Box out = none;
  for (int d = 0; d < a.rank(); ++d) {
    // Written with differences: sums of numbers from outside may overflow.
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const uint64_t skip_a =
        static_cast<uint64_t>(begin) - static_cast<uint64_t>(a.offsets[d]);
    const uint64_t skip_b =
        static_cast<uint64_t>(begin) - static_cast<uint64_t>(b.offsets[d]);
    const uint64_t size_a = static_cast<uint64_t>(a.sizes[d]);
    const uint64_t size_b = static_cast<uint64_t>(b.sizes[d]);
    if (skip_a >= size_a || skip_b >= size_b) return none;
    out.offsets[d] = begin;
    out.sizes[d] =
        static_cast<int64_t>(std::min(size_a - skip_a, size_b - skip_b));
  }
  return out;
}

bool MakeRun(const StridedBox& src, const StridedBox& dst, int64_t unit_bytes,
             Run* out) {
  const Box both = Intersect(src.box, dst.box);
  Run run;
  run.src = src.base;
  run.dst = dst.base;
  run.bytes = static_cast<uint64_t>(unit_bytes);
  std::array<Loop, kMaxDims> loops;
  int n = 0;
  for (int d = 0; d < both.rank(); ++d) {
    if (both.sizes[d] == 0) return false;
    run.src += static_cast<uint64_t>((both.offsets[d] - src.box.offsets[d]) *
                                     src.strides[d]);
    run.dst += static_cast<uint64_t>((both.offsets[d] - dst.box.offsets[d]) *
                                     dst.strides[d]);
    if (both.sizes[d] == 1) continue;
    loops[static_cast<size_t>(n++)] = {both.sizes[d], src.strides[d],
                                       dst.strides[d]};
  }
  // By insertion: a sort of the library takes memory for each placement.
  for (int i = 1; i < n; ++i) {
    const auto at = loops.begin() + i;
    std::rotate(std::upper_bound(loops.begin(), at, *at, Before), at, at + 1);
  }
  // Innermost first, each loop is folded into the bytes, then into the loop
  // inside it.
  const Loop unit = {1, unit_bytes, unit_bytes};
  Loop inner = unit;
  bool contiguous = true;
  std::array<Loop, kMaxDims> kept;  // innermost first
  int kept_n = 0;
  for (int i = n - 1; i >= 0; --i) {
    const Loop& loop = loops[static_cast<size_t>(i)];
    if (Folds(loop, inner)) {
      inner.count *= loop.count;
      continue;
    }
    if (contiguous) {
      run.bytes *= static_cast<uint64_t>(inner.count);
      contiguous = false;
    } else {
      kept[static_cast<size_t>(kept_n++)] = inner;
    }
    inner = loop;
  }
  if (contiguous) {
    run.bytes *= static_cast<uint64_t>(inner.count);
  } else {
    kept[static_cast<size_t>(kept_n++)] = inner;
  }
  run.loops = kept_n;
  for (int i = 0; i < kept_n; ++i) {
    const Loop& loop = kept[static_cast<size_t>(kept_n - 1 - i)];
    const size_t at = static_cast<size_t>(i);
    run.count[at] = loop.count;
    run.src_stride[at] = loop.src_stride;
    run.dst_stride[at] = loop.dst_stride;
  }
  *out = run;
  return true;
}

}  // namespace torch_ckpt
