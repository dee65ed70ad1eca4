#include "engine/read/stored_places.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "plan/runs.h"

namespace torch_ckpt {

Result<StoredPlaces> StoredPlaces::Of(const StoredView& view) {
  const Dims& shape = view.shape_in_units();
  StoredPlaces places;
  places.strides_ = DenseStrides(shape, 1);
  places.unit_bytes_ = static_cast<uint64_t>(view.unit_bytes());
  for (auto& [file, stored] : view.Boxes()) {
    const Dims& sizes = stored.box.sizes;
    const Dims dense = DenseStrides(sizes, view.unit_bytes());
    uint64_t row = 1;
    bool whole = true;  // of all dimensions behind
    for (int d = sizes.size() - 1; d >= 0; --d) {
      if (sizes[d] > 1 && stored.strides[d] != dense[d]) {
        return Unsupported("is not stored row by row");
      }
      if (whole) row *= static_cast<uint64_t>(sizes[d]);
      whole = whole && sizes[d] == shape[d];
    }
    places.boxes_.push_back({file, stored.base, std::move(stored.box), row});
  }
  std::sort(places.boxes_.begin(), places.boxes_.end(),
            [](const PlacedBox& a, const PlacedBox& b) {
              return std::tie(a.file, a.base) < std::tie(b.file, b.base);
            });
  for (size_t i = 1; i < places.boxes_.size(); ++i) {
    const PlacedBox& before = places.boxes_[i - 1];
    const PlacedBox& next = places.boxes_[i];
    const auto units = static_cast<uint64_t>(before.box.Volume());
    if (before.file == next.file &&
        next.base - before.base < units * places.unit_bytes_) {
      return Corrupt("has two boxes in the same bytes of a file");
    }
  }
  return places;
}

StoredPlaces::Place StoredPlaces::Find(uint32_t file, uint64_t offset) const {
  // The last one that begins at or before it.
  const auto after = std::upper_bound(
      boxes_.begin(), boxes_.end(), std::pair(file, offset),
      [](const std::pair<uint32_t, uint64_t>& at, const PlacedBox& each) {
        return at < std::pair(each.file, each.base);
      });
  const PlacedBox& placed = *(after - 1);
  const uint64_t unit = (offset - placed.base) / unit_bytes_;
  uint64_t first = 0, rest = unit;
  for (int d = placed.box.rank() - 1; d >= 0; --d) {
    const auto size = static_cast<uint64_t>(placed.box.sizes[d]);
    first += (static_cast<uint64_t>(placed.box.offsets[d]) + rest % size) *
             static_cast<uint64_t>(strides_[d]);
    rest /= size;
  }
  return {first, placed.row - unit % placed.row};
}

}  // namespace torch_ckpt
