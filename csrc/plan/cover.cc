// Both proofs cut the boxes into slabs wherever no box crosses, one dimension
// after the other. Whatever sharding makes falls apart into single boxes this
// way, at the cost of sorting it once per dimension. What does not fall apart
// is irregular: overlaps, or boxes that interlock. Overlaps are then found by
// a sweep, holes by cutting at the median boundary, through boxes.
#include "plan/cover.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <utility>

#include "plan/runs.h"

namespace torch_ckpt {
namespace {

using Items = std::span<size_t>;  // positions in a list of boxes

// Slabs that peel off a few boxes at a time would make the recursion deep;
// beyond this depth the general method takes over.
constexpr int kMaxSlabDepth = 64;

int64_t Begin(const Box& box, int dim) { return box.offsets[dim]; }
int64_t End(const Box& box, int dim) {
  int64_t end;
  if (__builtin_add_overflow(box.offsets[dim], box.sizes[dim], &end)) {
    return std::numeric_limits<int64_t>::max();
  }
  return end;
}

// Like !Empty(), for boxes whose volume may overflow.
bool HasVolume(const Box& box) {
  return std::all_of(box.sizes.begin(), box.sizes.end(),
                     [](int64_t size) { return size > 0; });
}

bool Contains(const Box& outer, const Box& inner) {
  for (int d = 0; d < inner.rank(); ++d) {
    if (Begin(outer, d) > Begin(inner, d) || End(outer, d) < End(inner, d)) {
      return false;
    }
  }
  return true;
}

// Sorts `items` by their begin along `dim`.
void SortByBegin(const std::vector<Box>& boxes, int dim, Items items) {
  std::vector<std::pair<int64_t, size_t>> keyed;
  keyed.reserve(items.size());
  for (size_t i : items) keyed.emplace_back(Begin(boxes[i], dim), i);
  std::sort(keyed.begin(), keyed.end());
  for (size_t k = 0; k < items.size(); ++k) items[k] = keyed[k].second;
}

struct Slab {
  Items items;  // whose union along the dimension is [begin, end)
  int64_t begin;
  int64_t end;
};

// Sorts `items` along `dim` and cuts them where no box crosses. REQUIRES:
// items is not empty.
std::vector<Slab> CutIntoSlabs(const std::vector<Box>& boxes, int dim,
                               Items items) {
  SortByBegin(boxes, dim, items);
  std::vector<Slab> slabs;
  size_t first = 0;
  int64_t begin = Begin(boxes[items[0]], dim);
  int64_t end = End(boxes[items[0]], dim);
  for (size_t k = 1; k < items.size(); ++k) {
    const Box& box = boxes[items[k]];
    if (Begin(box, dim) >= end) {
      slabs.push_back({items.subspan(first, k - first), begin, end});
      first = k;
      begin = Begin(box, dim);
    }
    end = std::max(end, End(box, dim));
  }
  slabs.push_back({items.subspan(first), begin, end});
  return slabs;
}

using Pair = std::optional<std::pair<size_t, size_t>>;

class OverlapFinder {
 public:
  OverlapFinder(const std::vector<Box>& boxes, int rank, Budget* budget)
      : boxes_(boxes), rank_(rank), budget_(*budget) {}

  // A pair of `items` that overlaps, or nullopt; exhausted() tells whether the
  // search gave up instead. The last `uncut` dimensions before `dim`
  // (in rotation) are known to give a single slab.
  Pair Find(Items items, int dim, int uncut, int depth) {
    if (items.size() <= 4) return Compare(items);
    if (!Look(items.size())) return std::nullopt;
    if (uncut == rank_ || depth == kMaxSlabDepth) return Sweep(items);
    const int next = (dim + 1) % rank_;
    const std::vector<Slab> slabs = CutIntoSlabs(boxes_, dim, items);
    if (slabs.size() == 1) return Find(items, next, uncut + 1, depth + 1);
    for (const Slab& slab : slabs) {
      if (Pair pair = Find(slab.items, next, 1, depth + 1)) return pair;
      if (exhausted_) break;
    }
    return std::nullopt;
  }
  bool exhausted() const { return exhausted_; }

 private:
  // At so many boxes.
  bool Look(size_t boxes) {
    exhausted_ = exhausted_ || !budget_.Step(boxes);
    return !exhausted_;
  }
  bool Overlap(size_t a, size_t b) const {
    return HasVolume(Intersect(boxes_[a], boxes_[b]));
  }

  Pair Compare(Items items) const {
    for (size_t j = 1; j < items.size(); ++j) {
      for (size_t i = 0; i < j; ++i) {
        if (Overlap(items[i], items[j])) return Named(items[i], items[j]);
      }
    }
    return std::nullopt;
  }

  // Moves a plane along the dimension with the most distinct begins. The boxes
  // it cuts are kept by their begin along a second dimension, so that only the
  // near ones are compared with the next box.
  Pair Sweep(Items items) {
    if (rank_ == 0) return Named(items[0], items[1]);
    const Axes axes = ChooseAxes(items);
    const int along = axes.along, across = axes.across;
    SortByBegin(boxes_, along, items);
    int64_t longest = 0;
    for (size_t i : items) {
      longest = std::max(longest, boxes_[i].sizes[across]);
    }
    std::multimap<int64_t, size_t> active;
    using Ending = std::pair<int64_t, std::multimap<int64_t, size_t>::iterator>;
    const auto later = [](const Ending& a, const Ending& b) {
      return a.first > b.first;
    };
    std::priority_queue<Ending, std::vector<Ending>, decltype(later)> endings(
        later);
    for (size_t i : items) {
      const Box& box = boxes_[i];
      while (!endings.empty() && endings.top().first <= Begin(box, along)) {
        active.erase(endings.top().second);
        endings.pop();
      }
      int64_t reach;  // nothing that begins before it comes near this box
      if (__builtin_sub_overflow(Begin(box, across), longest, &reach)) {
        reach = std::numeric_limits<int64_t>::min();
      }
      for (auto it = active.lower_bound(End(box, across));
           it != active.begin();) {
        --it;
        if (it->first <= reach) break;
        if (!Look(1)) return std::nullopt;
        if (Overlap(it->second, i)) return Named(it->second, i);
        if (axes.flat) break;  // the kept ones before this one end before it
      }
      endings.emplace(End(box, along), active.emplace(Begin(box, across), i));
    }
    return std::nullopt;
  }

  // The two dimensions with the most distinct begins, leaving aside those in
  // which all items overlap.
  struct Axes {
    int along = 0;
    int across = 0;
    bool flat = true;  // all items overlap in the other dimensions
  };
  Axes ChooseAxes(Items items) const {
    std::vector<std::pair<size_t, int>> distinct;  // count, dimension
    for (int d = 0; d < rank_; ++d) {
      std::vector<int64_t> begins;
      begins.reserve(items.size());
      int64_t first_end = std::numeric_limits<int64_t>::max();
      for (size_t i : items) {
        begins.push_back(Begin(boxes_[i], d));
        first_end = std::min(first_end, End(boxes_[i], d));
      }
      std::sort(begins.begin(), begins.end());
      if (begins.back() < first_end) continue;
      const auto end = std::unique(begins.begin(), begins.end());
      distinct.emplace_back(static_cast<size_t>(end - begins.begin()), d);
    }
    std::sort(distinct.begin(), distinct.end(), std::greater<>());
    Axes axes;
    if (!distinct.empty()) axes.along = axes.across = distinct[0].second;
    if (distinct.size() > 1) axes.across = distinct[1].second;
    axes.flat = distinct.size() <= 2;
    return axes;
  }

  static Pair Named(size_t a, size_t b) {
    return std::pair(std::min(a, b), std::max(a, b));
  }

  const std::vector<Box>& boxes_;
  const int rank_;
  Budget& budget_;
  bool exhausted_ = false;
};

class HoleFinder {
 public:
  // REQUIRES: boxes that have volume lie inside `region` and do not overlap.
  HoleFinder(const Box& region, const std::vector<Box>& boxes, Budget* budget)
      : region_(region), budget_(*budget) {
    boxes_.reserve(boxes.size());
    for (const Box& box : boxes) {
      if (HasVolume(box)) boxes_.push_back(box);
    }
  }

  // A part of the region that no box touches, or nullopt. exhausted() tells
  // whether the search gave up instead.
  std::optional<Box> Find() {
    std::vector<size_t> items(boxes_.size());
    std::iota(items.begin(), items.end(), size_t{0});
    return Find(region_, items, 0, 0, 0);
  }
  bool exhausted() const { return exhausted_; }

 private:
  // `items` lie inside `region`; `uncut` as in OverlapFinder.
  std::optional<Box> Find(const Box& region, Items items, int dim, int uncut,
                          int depth) {
    if (items.empty()) return region;
    exhausted_ = exhausted_ || !budget_.Step(items.size());
    if (exhausted_) return std::nullopt;
    for (size_t i : items) {
      if (Contains(boxes_[i], region)) return std::nullopt;
    }
    const int rank = region.rank();
    if (uncut == rank || depth >= kMaxSlabDepth) {
      return FindInHalves(region, items, depth);
    }
    const int next = (dim + 1) % rank;
    const std::vector<Slab> slabs = CutIntoSlabs(boxes_, dim, items);
    int64_t at = Begin(region, dim);
    for (const Slab& slab : slabs) {
      if (slab.begin > at) return Part(region, dim, at, slab.begin);
      at = slab.end;
    }
    if (at < End(region, dim)) return Part(region, dim, at, End(region, dim));
    if (IsOnlyDim(region, items, dim)) return std::nullopt;
    if (slabs.size() == 1) {
      return Find(region, items, next, uncut + 1, depth + 1);
    }
    for (const Slab& slab : slabs) {
      const Box part = Part(region, dim, slab.begin, slab.end);
      if (auto hole = Find(part, slab.items, next, 1, depth + 1)) return hole;
    }
    return std::nullopt;
  }

  // Cuts through boxes, at the median of the boundaries inside the region of
  // the dimension that has the most. There is one, since no item contains the
  // region; each cut halves them, so this ends.
  std::optional<Box> FindInHalves(const Box& region, Items items, int depth) {
    int dim = 0;
    std::vector<int64_t> boundaries;
    for (int d = 0; d < region.rank(); ++d) {
      std::vector<int64_t> found;
      for (size_t i : items) {
        for (int64_t at : {Begin(boxes_[i], d), End(boxes_[i], d)}) {
          if (at > Begin(region, d) && at < End(region, d)) found.push_back(at);
        }
      }
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
      if (found.size() > boundaries.size()) {
        boundaries = std::move(found);
        dim = d;
      }
    }
    const int64_t cut = boundaries[boundaries.size() / 2];
    for (const Box& half : {Part(region, dim, Begin(region, dim), cut),
                            Part(region, dim, cut, End(region, dim))}) {
      const size_t kept_boxes = boxes_.size();
      std::vector<size_t> inside;
      for (size_t i : items) {
        const Box part = Intersect(boxes_[i], half);
        if (!HasVolume(part)) continue;
        if (part == boxes_[i]) {
          inside.push_back(i);
        } else {
          inside.push_back(boxes_.size());
          boxes_.push_back(part);
        }
      }
      if (auto hole = Find(half, inside, 0, 0, depth + 1)) return hole;
      boxes_.resize(kept_boxes);
    }
    return std::nullopt;
  }

  // True when every item spans the region in all dimensions but `dim`, so that
  // their union along `dim` decides.
  bool IsOnlyDim(const Box& region, Items items, int dim) const {
    for (int d = 0; d < region.rank(); ++d) {
      if (d == dim) continue;
      for (size_t i : items) {
        if (boxes_[i].sizes[d] != region.sizes[d]) return false;
      }
    }
    return true;
  }

  static Box Part(Box region, int dim, int64_t begin, int64_t end) {
    region.offsets[dim] = begin;
    region.sizes[dim] = end - begin;
    return region;
  }

  const Box region_;
  std::vector<Box> boxes_;
  Budget& budget_;
  bool exhausted_ = false;
};

// box.ToString(), for boxes with volume whose end may overflow.
std::string Text(Box box) {
  for (int d = 0; d < box.rank(); ++d) {
    box.sizes[d] = End(box, d) - Begin(box, d);
  }
  return box.ToString();
}

Status CheckRanks(int rank, const std::vector<Box>& boxes) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (boxes[i].rank() != rank || boxes[i].sizes.size() != rank) {
      return InvalidArgument("box " + std::to_string(i) + " has " +
                             std::to_string(boxes[i].rank()) +
                             " dimensions instead of " + std::to_string(rank));
    }
  }
  return {};
}

Status TooIrregular(const Budget& budget) {
  return Exhausted(
      "the boxes interlock in too many ways to prove that they are all of a "
      "tensor: " +
      budget.Over().message());
}

Result<Pair> OverlapOf(int rank, const std::vector<Box>& boxes,
                       Budget* budget) {
  std::vector<size_t> items;
  items.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (HasVolume(boxes[i])) items.push_back(i);
  }
  OverlapFinder finder(boxes, rank, budget);
  const Pair pair = finder.Find(items, 0, 0, 0);
  if (finder.exhausted()) return TooIrregular(*budget);
  return pair;
}

Status RefuseOverlap(int rank, const std::vector<Box>& boxes, Budget* budget) {
  TC_ASSIGN_OR_RETURN(const Pair pair, OverlapOf(rank, boxes, budget));
  if (!pair) return {};
  const auto [a, b] = *pair;
  return Conflict("box " + std::to_string(a) + " " + Text(boxes[a]) +
                  " and box " + std::to_string(b) + " " + Text(boxes[b]) +
                  " overlap");
}

Status FindHole(const Box& region, const std::vector<Box>& boxes,
                Budget* budget) {
  HoleFinder finder(region, boxes, budget);
  const std::optional<Box> hole = finder.Find();
  if (hole) return Incomplete("nothing covers " + hole->ToString());
  if (finder.exhausted()) return TooIrregular(*budget);
  return {};
}

Budget BudgetOf(const std::vector<Box>& boxes) {
  return Budget("the list of boxes", boxes.size() * sizeof(Box));
}

}  // namespace

Status ProveTiling(const Box& region, const std::vector<Box>& boxes,
                   Budget* budget) {
  Budget own = BudgetOf(boxes);
  if (!budget) budget = &own;
  TC_RETURN_IF_ERROR(CheckRanks(region.rank(), boxes));
  // Wraps where the boxes overlap wildly, which is found out first.
  uint64_t volume = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!HasVolume(boxes[i])) continue;
    if (!Contains(region, boxes[i])) {
      return InvalidArgument("box " + std::to_string(i) + " " + Text(boxes[i]) +
                             " is not inside " + region.ToString());
    }
    volume += static_cast<uint64_t>(boxes[i].Volume());
  }
  TC_RETURN_IF_ERROR(RefuseOverlap(region.rank(), boxes, budget));
  if (!HasVolume(region) || volume == static_cast<uint64_t>(region.Volume())) {
    return {};
  }
  return FindHole(region, boxes, budget);
}

Status ProveDisjoint(const std::vector<Box>& boxes, Budget* budget) {
  Budget own = BudgetOf(boxes);
  if (!budget) budget = &own;
  if (boxes.empty()) return {};
  TC_RETURN_IF_ERROR(CheckRanks(boxes[0].rank(), boxes));
  return RefuseOverlap(boxes[0].rank(), boxes, budget);
}

Result<std::optional<std::pair<size_t, size_t>>> FindOverlap(
    const std::vector<Box>& boxes) {
  Budget budget = BudgetOf(boxes);
  if (boxes.empty()) return Pair();
  TC_RETURN_IF_ERROR(CheckRanks(boxes[0].rank(), boxes));
  return OverlapOf(boxes[0].rank(), boxes, &budget);
}

}  // namespace torch_ckpt
