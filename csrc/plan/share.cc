#include "plan/share.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace torch_ckpt {
namespace {

// By how much a rank may exceed its share, and the least that a box is cut
// into.
constexpr uint64_t kLeastBytes = 1 << 20;
constexpr uint64_t kLeastPart = 64;

Status Check(const ShareProblem& problem) {
  for (const std::vector<uint32_t>& set : problem.sets) {
    if (set.empty()) return InvalidArgument("a box that no rank holds");
    for (const uint32_t rank : set) {
      if (rank >= problem.nodes.size()) {
        return InvalidArgument("a holder that is no rank");
      }
    }
  }
  for (const SharedBox& box : problem.boxes) {
    if (box.holders >= problem.sets.size()) {
      return InvalidArgument("a box without holders");
    }
    if (box.rows == 0) return InvalidArgument("a box without rows");
  }
  return {};
}

uint64_t Bytes(const SharedBox& box) { return box.rows * box.row_bytes; }

// What the least loaded come to when `bytes` more are shared out as equally as
// these loads allow.
uint64_t Level(std::vector<uint64_t> loads, uint64_t bytes) {
  std::sort(loads.begin(), loads.end());
  uint64_t count = 1;
  for (; count < loads.size(); ++count) {
    const uint64_t room = (loads[count] - loads[count - 1]) * count;
    if (room >= bytes) break;
    bytes -= room;
  }
  return loads[count - 1] + (bytes + count - 1) / count;
}

class Sharing {
 public:
  explicit Sharing(const ShareProblem& problem)
      : problem_(problem), load_(problem.nodes.size()) {}

  // `boxes` have the same holders; the largest come first.
  void Add(const std::vector<uint32_t>& boxes) {
    const std::vector<uint32_t>& holders =
        problem_.sets[problem_.boxes[boxes[0]].holders];
    std::vector<uint64_t> loads;
    for (const uint32_t rank : holders) loads.push_back(load_[rank]);
    uint64_t bytes = 0;
    for (const uint32_t i : boxes) bytes += Bytes(problem_.boxes[i]);
    const uint64_t level = Level(std::move(loads), bytes);
    for (const uint32_t i : boxes) AddBox(i, level);
  }

  std::vector<BoxShare> Take() && {
    std::sort(pieces_.begin(), pieces_.end(),
              [](const BoxShare& a, const BoxShare& b) {
                return a.box != b.box ? a.box < b.box : a.begin < b.begin;
              });
    return std::move(pieces_);
  }

 private:
  void AddBox(uint32_t number, uint64_t level) {
    const SharedBox& box = problem_.boxes[number];
    for (uint64_t begin = 0; begin < box.rows;) {
      const uint32_t rank = LeastLoaded(box);
      const uint64_t end = begin + RowsFor(rank, box, box.rows - begin, level);
      BoxShare* const last = pieces_.empty() ? nullptr : &pieces_.back();
      if (last && last->box == number && last->rank == rank) {
        last->end = end;
      } else {
        pieces_.push_back({number, rank, begin, end});
      }
      load_[rank] += (end - begin) * box.row_bytes;
      if (box.near) used_[box.tensor].insert(problem_.nodes[rank]);
      begin = end;
    }
  }

  uint32_t LeastLoaded(const SharedBox& box) const {
    const auto used = box.near ? used_.find(box.tensor) : used_.end();
    const auto is_near = [&](uint32_t rank) {
      return used != used_.end() && used->second.contains(problem_.nodes[rank]);
    };
    const std::vector<uint32_t>& holders = problem_.sets[box.holders];
    uint32_t best = holders[0];
    for (const uint32_t rank : holders) {
      const bool nearer = is_near(rank) && !is_near(best);
      const bool as_near = is_near(rank) == is_near(best);
      if (nearer || (as_near && load_[rank] < load_[best])) best = rank;
    }
    return best;
  }

  // How many of the `left` rows of `box` go to `rank`: at least one.
  uint64_t RowsFor(uint32_t rank, const SharedBox& box, uint64_t left,
                   uint64_t level) const {
    const uint64_t room = level - std::min(level, load_[rank]);
    const uint64_t more = std::max(kLeastBytes, level / kLeastPart);
    if (left == 1 || left * box.row_bytes <= room + more) return left;
    return std::clamp<uint64_t>(std::max(room, more) / box.row_bytes, 1, left);
  }

  const ShareProblem& problem_;
  std::vector<uint64_t> load_;                   // bytes, by rank
  std::map<uint32_t, std::set<uint32_t>> used_;  // nodes, by tensor
  std::vector<BoxShare> pieces_;
};

}  // namespace

Result<std::vector<BoxShare>> ShareOut(const ShareProblem& problem) {
  TC_RETURN_IF_ERROR(Check(problem));
  const std::vector<SharedBox>& boxes = problem.boxes;
  std::vector<uint32_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto holders = [&](uint32_t i) {
    const uint32_t set = boxes[i].holders;
    return std::pair(problem.sets[set].size(), set);
  };
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const auto of_a = holders(a), of_b = holders(b);
    return of_a != of_b ? of_a < of_b : Bytes(boxes[a]) > Bytes(boxes[b]);
  });
  Sharing sharing(problem);
  std::vector<uint32_t> alike;
  for (size_t i = 0; i < order.size(); ++i) {
    alike.push_back(order[i]);
    if (i + 1 < order.size() && holders(order[i + 1]) == holders(order[i])) {
      continue;
    }
    sharing.Add(alike);
    alike.clear();
  }
  return std::move(sharing).Take();
}

}  // namespace torch_ckpt
