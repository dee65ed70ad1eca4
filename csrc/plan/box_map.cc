#include "plan/box_map.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

// Indices [first, first + count) of an axis.
struct Taken {
  int64_t first = 0, count = 0;
};

// Those of the axis whose places in the tensor are in [begin, begin + size).
Taken Inside(const Selection::Axis& axis, int64_t begin, int64_t size) {
  const auto first_at = [&](int64_t place) {  // or behind it
    if (place <= axis.start) return int64_t{0};
    return std::min(axis.count,
                    (place - axis.start + axis.step - 1) / axis.step);
  };
  const int64_t first = first_at(begin);
  return {first, first_at(begin + size) - first};
}

// Fills in the boxes of axes [at, ...), of the indices in `taken`.
void AddBoxes(const Selection& to, const std::vector<Taken>& taken, size_t at,
              const StridedBox& box, std::vector<StridedBox>* out) {
  if (at == to.axes.size()) {
    out->push_back(box);
    return;
  }
  const Selection::Axis& axis = to.axes[at];
  StridedBox next = box;
  const int64_t stride = box.strides[axis.dim];
  next.box.offsets[axis.dim] = axis.start + axis.step * taken[at].first;
  if (axis.step == 1) {
    next.box.sizes[axis.dim] = taken[at].count;
    AddBoxes(to, taken, at + 1, next, out);
    return;
  }
  next.box.sizes[axis.dim] = 1;
  for (int64_t i = 0; i < taken[at].count; ++i) {
    AddBoxes(to, taken, at + 1, next, out);
    next.box.offsets[axis.dim] += axis.step;
    next.base += static_cast<uint64_t>(stride);
  }
}

}  // namespace

bool Selection::operator==(const Selection& o) const {
  return at == o.at &&
         std::equal(axes.begin(), axes.end(), o.axes.begin(), o.axes.end(),
                    [](const Axis& a, const Axis& b) {
                      return a.dim == b.dim && a.start == b.start &&
                             a.step == b.step && a.count == b.count;
                    });
}

std::vector<Box> BoxesOf(const Selection& selection) {
  const int rank = selection.at.size();
  StridedBox none{
      {selection.at, Dims::Filled(rank, 1)}, 0, Dims::Filled(rank, 0)};
  std::vector<Taken> all;
  for (const Selection::Axis& axis : selection.axes) {
    if (axis.count == 0) return {};
    all.push_back({0, axis.count});
  }
  std::vector<StridedBox> boxes;
  AddBoxes(selection, all, 0, none, &boxes);
  std::vector<Box> out;
  out.reserve(boxes.size());
  for (StridedBox& each : boxes) out.push_back(std::move(each.box));
  return out;
}

void MapBox(const SelectionPair& pair, const StridedBox& box,
            std::vector<StridedBox>* out) {
  // What is one index in the tensor must be in the box.
  std::vector<bool> is_axis(static_cast<size_t>(box.box.rank()));
  for (const Selection::Axis& axis : pair.from.axes) {
    is_axis[static_cast<size_t>(axis.dim)] = true;
  }
  uint64_t base = box.base;
  for (int d = 0; d < box.box.rank(); ++d) {
    if (is_axis[static_cast<size_t>(d)]) continue;
    const int64_t into = pair.from.at[d] - box.box.offsets[d];
    if (into < 0 || into >= box.box.sizes[d]) return;
    base += static_cast<uint64_t>(into * box.strides[d]);
  }
  const int rank = pair.to.at.size();
  StridedBox mapped{
      {pair.to.at, Dims::Filled(rank, 1)}, 0, Dims::Filled(rank, 0)};
  std::vector<Taken> taken;
  for (size_t i = 0; i < pair.from.axes.size(); ++i) {
    const Selection::Axis& axis = pair.from.axes[i];
    const int d = axis.dim;
    const Taken indices = Inside(axis, box.box.offsets[d], box.box.sizes[d]);
    if (indices.count <= 0) return;
    taken.push_back(indices);
    const int64_t first = axis.start + axis.step * indices.first;
    base +=
        static_cast<uint64_t>((first - box.box.offsets[d]) * box.strides[d]);
    mapped.strides[pair.to.axes[i].dim] = axis.step * box.strides[d];
  }
  mapped.base = base;
  AddBoxes(pair.to, taken, 0, mapped, out);
}

}  // namespace torch_ckpt
