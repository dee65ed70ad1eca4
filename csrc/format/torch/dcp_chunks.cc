#include "format/torch/dcp_chunks.h"

#include <functional>
#include <numeric>
#include <optional>

namespace torch_ckpt {
namespace {

Dims ToDims(std::span<const int64_t> numbers) {
  Dims out;
  for (const int64_t number : numbers) out.push_back(number);
  return out;
}

}  // namespace

DcpChunks::DcpChunks(int rank, int64_t packed, size_t count)
    : rank_(static_cast<size_t>(rank)), packed_(packed), found_(count, false) {
  numbers_.reserve(2 * rank_ * count);
}

Status DcpChunks::Add(const Dims& offsets, const Dims& sizes) {
  for (const Dims* each : {&offsets, &sizes}) {
    if (static_cast<size_t>(each->size()) != rank_) {
      return Corrupt("the metadata has no box of a chunk");
    }
    numbers_.insert(numbers_.end(), each->begin(), each->end());
  }
  return {};
}

Status DcpChunks::Take(const Dims& offsets, size_t hint, Box* box) {
  size_t at = hint;
  if (at >= found_.size() || !IsAt(at, offsets)) {
    TC_ASSIGN_OR_RETURN(const size_t first, Search(offsets));
    at = sorted_[first];
  }
  if (found_[at]) {
    return Conflict("the metadata says twice where " + offsets.ToString() +
                    " is");
  }
  found_[at] = true;
  box->offsets = offsets;
  box->sizes = ToDims(Sizes(at));
  for (Dims* each : {&box->offsets, &box->sizes}) {
    if (packed_ > 1 && !each->empty()) (*each)[each->size() - 1] *= packed_;
  }
  return {};
}

Status DcpChunks::CheckAllFound() {
  if (std::ranges::all_of(found_, std::identity())) return {};
  Sort();
  for (size_t first = 0; first < sorted_.size();) {
    // Those at the same offsets, of which one that has a place stands for all.
    const Dims offsets = ToDims(Offsets(sorted_[first]));
    size_t end = first;
    std::optional<size_t> placed;
    for (; end < sorted_.size() && IsAt(sorted_[end], offsets); ++end) {
      if (found_[sorted_[end]]) placed = sorted_[end];
    }
    if (!placed) {
      return Incomplete(
          "the metadata does not say which file has the chunk at " +
          offsets.ToString());
    }
    for (; first < end; ++first) {
      if (!std::ranges::equal(Sizes(sorted_[first]), Sizes(*placed))) {
        return Conflict("the metadata has two chunks at " + offsets.ToString());
      }
    }
  }
  return {};
}

void DcpChunks::Sort() {
  if (!sorted_.empty()) return;
  sorted_.resize(found_.size());
  std::iota(sorted_.begin(), sorted_.end(), 0u);
  std::sort(sorted_.begin(), sorted_.end(), [this](uint32_t a, uint32_t b) {
    return std::ranges::lexicographical_compare(Offsets(a), Offsets(b));
  });
}

Result<size_t> DcpChunks::Search(const Dims& offsets) {
  Sort();
  const auto at = std::lower_bound(
      sorted_.begin(), sorted_.end(), offsets,
      [this](uint32_t a, const Dims& b) {
        return std::ranges::lexicographical_compare(Offsets(a), b);
      });
  if (at == sorted_.end() || !IsAt(*at, offsets)) {
    return Corrupt("the metadata knows no chunk at " + offsets.ToString());
  }
  return static_cast<size_t>(at - sorted_.begin());
}

}  // namespace torch_ckpt
