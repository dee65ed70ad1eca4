// The template part of plan/runs.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "plan/runs.h"

namespace torch_ckpt {
namespace runs_internal {

// `run` advanced by `steps` of its loop `level`, which then has `count`
// iterations. A loop of one iteration is removed.
inline Run SliceLoop(const Run& run, int level, int64_t steps, int64_t count) {
  Run slice = run;
  const size_t at = static_cast<size_t>(level);
  slice.src += static_cast<uint64_t>(steps * run.src_stride[at]);
  slice.dst += static_cast<uint64_t>(steps * run.dst_stride[at]);
  slice.count[at] = count;
  if (count > 1) return slice;
  --slice.loops;
  for (size_t l = at; l < static_cast<size_t>(slice.loops); ++l) {
    slice.count[l] = run.count[l + 1];
    slice.src_stride[l] = run.src_stride[l + 1];
    slice.dst_stride[l] = run.dst_stride[l + 1];
  }
  return slice;
}

// Cuts the loops from `level` on. Loops before it have a src stride of 0 and
// stay whole in every slice, so that a span of src is visited only once.
template <class Fn>
void SplitFrom(const Run& run, int level, uint64_t max_span, Fn& fn) {
  if (run.SrcSpan() <= max_span) {
    fn(run);
    return;
  }
  while (level < run.loops && run.src_stride[static_cast<size_t>(level)] == 0) {
    ++level;
  }
  if (level == run.loops) {
    Run slice = run;
    for (uint64_t done = 0; done < run.bytes; done += slice.bytes) {
      slice.src = run.src + done;
      slice.dst = run.dst + done;
      slice.bytes = std::min(max_span, run.bytes - done);
      fn(std::as_const(slice));
    }
    return;
  }
  const size_t at = static_cast<size_t>(level);
  const int64_t count = run.count[at];
  const uint64_t inner_span = SliceLoop(run, level, 0, 1).SrcSpan();
  if (inner_span <= max_span) {
    const uint64_t more =
        (max_span - inner_span) / static_cast<uint64_t>(run.src_stride[at]);
    // The whole loop does not fit, hence more < count - 1.
    const int64_t step = static_cast<int64_t>(more) + 1;
    for (int64_t i = 0; i < count; i += step) {
      const Run slice = SliceLoop(run, level, i, std::min(step, count - i));
      fn(slice);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    SplitFrom(SliceLoop(run, level, i, 1), level, max_span, fn);
  }
}

}  // namespace runs_internal

template <class Fn>
void SplitBySrcSpan(const Run& run, uint64_t max_span, Fn&& fn) {
  runs_internal::SplitFrom(run, 0, std::max<uint64_t>(max_span, 1), fn);
}

}  // namespace torch_ckpt
