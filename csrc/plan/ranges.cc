#include "plan/ranges.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

// Appends the boxes of elements [begin, end) of the sub-tensor that `prefix`
// (offsets of the dimensions before `dim`) selects. A range that starts or
// ends inside a row recurses into that row: at most one box per level on each
// side, plus one between them.
void AppendRange(const Dims& shape, const Dims& prefix, int64_t begin,
                 int64_t end, std::vector<Box>* out) {
  const int dim = prefix.size();
  if (begin == end) return;
  if (dim == shape.size()) {  // a scalar
    out->push_back({prefix, Dims::Filled(dim, 1)});
    return;
  }
  int64_t row = 1;  // elements of one row; not 0, since the range is not empty
  for (int d = dim + 1; d < shape.size(); ++d) row *= shape[d];
  const auto in_row = [&](int64_t index, int64_t from, int64_t to) {
    Dims deeper = prefix;
    deeper.push_back(index);
    AppendRange(shape, deeper, from, to, out);
  };
  int64_t first = begin / row;
  const int64_t last = end / row;
  if (begin % row != 0) {
    if (first == last) return in_row(first, begin % row, end % row);
    in_row(first, begin % row, row);
    ++first;
  }
  if (first < last) {
    Box whole = {prefix, Dims::Filled(dim, 1)};
    whole.offsets.push_back(first);
    whole.sizes.push_back(last - first);
    for (int d = dim + 1; d < shape.size(); ++d) {
      whole.offsets.push_back(0);
      whole.sizes.push_back(shape[d]);
    }
    out->push_back(whole);
  }
  if (end % row != 0) in_row(last, 0, end % row);
}

}  // namespace

std::vector<Box> BoxesOfRange(const Dims& shape, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  AppendRange(shape, Dims(), begin, end, &boxes);
  return boxes;
}

std::vector<uint64_t> BalancedCuts(uint64_t total, int parts, uint64_t grain) {
  const uint64_t n = static_cast<uint64_t>(parts);
  const uint64_t grains = total / grain + (total % grain != 0 ? 1 : 0);
  const uint64_t each = grains / n;
  // The last grain may be short. The parts with one grain more come last, so
  // that the short one is among them and no two parts differ by more than one.
  const uint64_t small_parts = n - grains % n;
  std::vector<uint64_t> cuts;
  cuts.reserve(n + 1);
  for (uint64_t i = 0; i <= n; ++i) {
    const uint64_t at = i * each + (i > small_parts ? i - small_parts : 0);
    cuts.push_back(at == grains ? total : at * grain);
  }
  return cuts;
}

}  // namespace torch_ckpt
