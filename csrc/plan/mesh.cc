#include "plan/mesh.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace torch_ckpt {
namespace {

struct Interval {
  int64_t begin;
  int64_t end;
};
// What a rank holds of one tensor dimension: disjoint, ascending, not empty,
// never adjacent. The local tensor is their concatenation.
using Intervals = std::vector<Interval>;

int64_t Length(const Intervals& intervals) {
  int64_t n = 0;
  for (const Interval& i : intervals) n += i.end - i.begin;
  return n;
}

// Chunk `index` of torch.chunk(range, chunks).
Interval Chunk(const Interval& range, int64_t chunks, int64_t index) {
  const int64_t length = range.end - range.begin;
  const int64_t size = length / chunks + (length % chunks != 0 ? 1 : 0);
  // Trailing chunks may be short or empty; the test keeps the product small.
  const bool past = size == 0 || index >= length / size + 1;
  const int64_t begin = past ? length : std::min(length, size * index);
  return {range.begin + begin, range.begin + std::min(length, begin + size)};
}

// Reads ascending local ranges of `held` and collects them in global terms.
class Picker {
 public:
  explicit Picker(const Intervals& held) : held_(held) {}

  // REQUIRES: `local` starts at or after the end of the previous one.
  void Pick(Interval local) {
    while (local.begin < local.end) {
      const Interval& at = held_[index_];
      const int64_t length = at.end - at.begin;
      if (local.begin >= passed_ + length) {
        passed_ += length;
        ++index_;
        continue;
      }
      const int64_t begin = at.begin + (local.begin - passed_);
      const int64_t end = std::min(at.end, begin + (local.end - local.begin));
      if (!picked_.empty() && picked_.back().end == begin) {
        picked_.back().end = end;
      } else {
        picked_.push_back({begin, end});
      }
      local.begin += end - begin;
    }
  }
  size_t count() const { return picked_.size(); }
  Intervals Take() { return std::move(picked_); }

 private:
  const Intervals& held_;
  size_t index_ = 0;
  int64_t passed_ = 0;  // local length before held_[index_]
  Intervals picked_;
};

Status CheckRule(const Dims& shape, const MeshRule& rule,
                 const Dims& coordinate) {
  if (rule.placements.size() != static_cast<size_t>(rule.mesh.size())) {
    return InvalidArgument(std::to_string(rule.placements.size()) +
                           " placements for a mesh of shape " +
                           rule.mesh.ToString());
  }
  if (coordinate.size() != rule.mesh.size()) {
    return InvalidArgument("coordinate " + coordinate.ToString() +
                           " for a mesh of shape " + rule.mesh.ToString());
  }
  for (int64_t size : shape) {
    if (size < 0) {
      return InvalidArgument("negative size in shape " + shape.ToString());
    }
  }
  for (int m = 0; m < rule.mesh.size(); ++m) {
    if (rule.mesh[m] < 1 || coordinate[m] < 0 ||
        coordinate[m] >= rule.mesh[m]) {
      return InvalidArgument("coordinate " + coordinate.ToString() +
                             " is not in a mesh of shape " +
                             rule.mesh.ToString());
    }
    const MeshPlacement& placement = rule.placements[static_cast<size_t>(m)];
    switch (placement.kind) {
      case MeshPlacementKind::kReplicate:
        continue;
      case MeshPlacementKind::kStridedShard:
        if (placement.split_factor < 1) {
          return InvalidArgument("split factor " +
                                 std::to_string(placement.split_factor) +
                                 " is not positive");
        }
        [[fallthrough]];
      case MeshPlacementKind::kShard:
        if (placement.dim < 0 || placement.dim >= shape.size()) {
          return InvalidArgument("a shard of dimension " +
                                 std::to_string(placement.dim) +
                                 " of a tensor of shape " + shape.ToString());
        }
        continue;
    }
    return InvalidArgument("unknown placement kind");
  }
  return {};
}

// The part that the rank at `index` of `ranks` keeps of `held`.
Result<Intervals> Apply(const MeshPlacement& placement, int64_t ranks,
                        int64_t index, const Intervals& held, Budget* budget) {
  const Interval all = {0, Length(held)};
  Picker picker(held);
  if (placement.kind == MeshPlacementKind::kShard) {
    picker.Pick(Chunk(all, ranks, index));
    return picker.Take();
  }
  // As if the dimension had been cut into split_factor pieces before: chunk
  // `index` of each piece, one after the other.
  // Most of the pieces may be empty.
  const auto pieces =
      static_cast<uint64_t>(std::min(placement.split_factor, all.end));
  if (!budget->Step(pieces) || !budget->Keep(pieces * sizeof(Interval))) {
    return budget->Over();
  }
  for (int64_t j = 0; j < placement.split_factor; ++j) {
    const Interval piece = Chunk(all, placement.split_factor, j);
    if (piece.begin == piece.end) break;  // and so are all that follow
    picker.Pick(Chunk(piece, ranks, index));
  }
  return picker.Take();
}

// One list per tensor dimension. Mesh dimensions apply from left to right.
using HeldDims = std::array<Intervals, kMaxDims>;
Result<HeldDims> Expand(const Dims& shape, const MeshRule& rule,
                        const Dims& coordinate, Budget* budget) {
  TC_RETURN_IF_ERROR(CheckRule(shape, rule, coordinate));
  HeldDims held;
  for (int d = 0; d < shape.size(); ++d) {
    if (shape[d] > 0) held[static_cast<size_t>(d)].push_back({0, shape[d]});
  }
  for (int m = 0; m < rule.mesh.size(); ++m) {
    const MeshPlacement& placement = rule.placements[static_cast<size_t>(m)];
    if (placement.kind == MeshPlacementKind::kReplicate) continue;
    Intervals& dim = held[static_cast<size_t>(placement.dim)];
    TC_ASSIGN_OR_RETURN(
        dim, Apply(placement, rule.mesh[m], coordinate[m], dim, budget));
  }
  return held;
}

}  // namespace

Result<std::vector<LocalBox>> ExpandRule(const Dims& shape,
                                         const MeshRule& rule,
                                         const Dims& coordinate,
                                         Budget* budget) {
  TC_ASSIGN_OR_RETURN(const HeldDims held,
                      Expand(shape, rule, coordinate, budget));
  uint64_t boxes = 1;
  for (int d = 0; d < shape.size(); ++d) {
    const uint64_t n = held[static_cast<size_t>(d)].size();
    if (n == 0) return std::vector<LocalBox>();
    // No list is longer than 2^32: the budget saw to that.
    boxes = std::min(boxes * n, uint64_t{UINT32_MAX});
  }
  if (!budget->Step(boxes) || !budget->Keep(boxes * sizeof(LocalBox))) {
    return budget->Over();
  }
  // The product of the lists, the last dimension fastest. Each step splits
  // every box of the dimensions before by the intervals of one more.
  std::vector<LocalBox> out(1);
  for (int d = 0; d < shape.size(); ++d) {
    std::vector<LocalBox> longer;
    longer.reserve(out.size() * held[static_cast<size_t>(d)].size());
    for (const LocalBox& prefix : out) {
      int64_t local = 0;
      for (const Interval& i : held[static_cast<size_t>(d)]) {
        LocalBox& box = longer.emplace_back(prefix);
        box.box.offsets.push_back(i.begin);
        box.box.sizes.push_back(i.end - i.begin);
        box.local_offset.push_back(local);
        local += i.end - i.begin;
      }
    }
    out = std::move(longer);
  }
  return out;
}

}  // namespace torch_ckpt
