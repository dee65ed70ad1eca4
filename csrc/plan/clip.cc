#include "plan/clip.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

void Shift(Run* run, uint64_t steps, int64_t src_stride, int64_t dst_stride) {
  run->src += steps * static_cast<uint64_t>(src_stride);
  run->dst += steps * static_cast<uint64_t>(dst_stride);
}

// Puts the outermost loop of `run` around a part of what is inside it.
Run Repeat(const Run& run, const Run& part) {
  Run out = part;
  ++out.loops;
  for (size_t l = static_cast<size_t>(part.loops); l > 0; --l) {
    out.count[l] = part.count[l - 1];
    out.src_stride[l] = part.src_stride[l - 1];
    out.dst_stride[l] = part.dst_stride[l - 1];
  }
  out.count[0] = run.count[0];
  out.src_stride[0] = run.src_stride[0];
  out.dst_stride[0] = run.dst_stride[0];
  return out;
}

}  // namespace

void ClipRun(const Run& run, uint64_t lo, uint64_t hi, std::vector<Run>* out) {
  const uint64_t end = run.src + run.SrcSpan();
  if (lo >= hi || end <= lo || run.src >= hi) return;
  if (run.src >= lo && end <= hi) {
    out->push_back(run);
    return;
  }
  if (run.loops == 0) {
    Run part = run;
    const uint64_t from = std::max(run.src, lo);
    part.src = from;
    part.dst = run.dst + (from - run.src);
    part.bytes = std::min(end, hi) - from;
    out->push_back(part);
    return;
  }
  const Run inner = InnerRun(run);
  if (run.src_stride[0] == 0) {
    // Every slice is the same bytes.
    const size_t first = out->size();
    ClipRun(inner, lo, hi, out);
    for (size_t i = first; i < out->size(); ++i) {
      (*out)[i] = Repeat(run, (*out)[i]);
    }
    return;
  }
  const uint64_t span = inner.SrcSpan();
  const auto stride = static_cast<uint64_t>(run.src_stride[0]);
  const auto count = static_cast<uint64_t>(run.count[0]);
  // Slice i stands at [src + i * stride, src + i * stride + span); those that
  // end at or before `lo` have nothing there.
  const uint64_t first_touched =
      lo < run.src + span ? 0 : (lo - run.src - span) / stride + 1;
  for (uint64_t i = first_touched; i < count;) {
    const uint64_t begin = run.src + i * stride;
    if (begin >= hi) break;
    if (begin >= lo && begin + span <= hi) {
      const uint64_t whole =
          std::min(count - i, (hi - begin - span) / stride + 1);
      Run part = whole == 1 ? inner : run;
      if (whole > 1) part.count[0] = static_cast<int64_t>(whole);
      Shift(&part, i, run.src_stride[0], run.dst_stride[0]);
      out->push_back(part);
      i += whole;
    } else {
      Run part = inner;
      Shift(&part, i, run.src_stride[0], run.dst_stride[0]);
      ClipRun(part, lo, hi, out);
      ++i;
    }
  }
}

}  // namespace torch_ckpt
