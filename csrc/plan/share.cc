#include "plan/share.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace torch_ckpt {
namespace {

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
  }
  return {};
}

}  // namespace

Result<std::vector<uint32_t>> ShareOut(const ShareProblem& problem) {
  TC_RETURN_IF_ERROR(Check(problem));
  const std::vector<SharedBox>& boxes = problem.boxes;
  std::vector<uint32_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const size_t of_a = problem.sets[boxes[a].holders].size();
    const size_t of_b = problem.sets[boxes[b].holders].size();
    return of_a != of_b ? of_a < of_b : boxes[a].bytes > boxes[b].bytes;
  });
  std::vector<uint32_t> chosen(boxes.size());
  std::vector<uint64_t> load(problem.nodes.size());
  std::map<uint32_t, std::set<uint32_t>> used;  // nodes, by tensor
  for (const uint32_t i : order) {
    const SharedBox& box = boxes[i];
    std::set<uint32_t>* const near = box.near ? &used[box.tensor] : nullptr;
    const auto is_near = [&](uint32_t rank) {
      return near && near->contains(problem.nodes[rank]);
    };
    const std::vector<uint32_t>& holders = problem.sets[box.holders];
    uint32_t best = holders[0];
    for (const uint32_t rank : holders) {
      const bool nearer = is_near(rank) && !is_near(best);
      const bool as_near = is_near(rank) == is_near(best);
      if (nearer || (as_near && load[rank] < load[best])) best = rank;
    }
    chosen[i] = best;
    load[best] += box.bytes;
    if (near) near->insert(problem.nodes[best]);
  }
  return chosen;
}

}  // namespace torch_ckpt
