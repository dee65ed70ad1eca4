#include "ops/overlap.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

namespace torch_ckpt::ops {
namespace {

// From the first byte to behind the last one; 0 of an empty tensor.
uint64_t SpanBytes(const SourceTensor& tensor) {
  if (tensor.bytes() == 0) return 0;
  int64_t span = tensor.element_bytes;
  for (int d = 0; d < tensor.sizes.size(); ++d) {
    span += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  return static_cast<uint64_t>(span);
}

// To prove that two tensors share nothing.
constexpr uint64_t kMostSteps = 100'000;

// Bytes of a strided tensor: runs of `run` bytes, repeated along `dims`, the
// largest stride first.
struct Nest {
  struct Repeat {
    uint64_t count, stride;
  };
  uint64_t begin = 0, run = 0;
  std::vector<Repeat> dims;
  size_t number = 0;  // of the tensor

  uint64_t End() const {
    uint64_t end = begin + run;
    for (const Repeat& dim : dims) end += (dim.count - 1) * dim.stride;
    return end;
  }
};

Nest NestOf(const SourceTensor& tensor, size_t number) {
  Nest nest{reinterpret_cast<uintptr_t>(tensor.data),
            static_cast<uint64_t>(tensor.element_bytes),
            {},
            number};
  for (int d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] < 2 || tensor.strides[d] == 0) continue;
    nest.dims.push_back({static_cast<uint64_t>(tensor.sizes[d]),
                         static_cast<uint64_t>(tensor.strides[d])});
  }
  std::sort(nest.dims.begin(), nest.dims.end(),
            [](const auto& a, const auto& b) { return a.stride > b.stride; });
  while (!nest.dims.empty() && nest.dims.back().stride == nest.run) {
    nest.run *= nest.dims.back().count;
    nest.dims.pop_back();
  }
  return nest;
}

// Whether all strides are multiples of a period in which each has bytes of its
// own, as the columns of a matrix have.
bool TakeTurns(std::span<const Nest> nests) {
  uint64_t period = 0;
  for (const Nest& nest : nests) {
    for (const Nest::Repeat& dim : nest.dims) {
      period = std::gcd(period, dim.stride);
    }
  }
  if (period == 0) return false;
  std::vector<std::pair<uint64_t, uint64_t>> places;  // in the period; bytes
  for (const Nest& nest : nests) {
    places.emplace_back(nest.begin % period, nest.run);
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 0; i < places.size(); ++i) {
    const uint64_t next =
        i + 1 < places.size() ? places[i + 1].first : places[0].first + period;
    if (places[i].first + places[i].second > next) return false;
  }
  return true;
}

// Whether a byte is in both; whether one may be, after that many steps.
bool Meet(const Nest& a, const Nest& b, uint64_t* steps) {
  if (a.End() <= b.begin || b.End() <= a.begin) return false;
  if (*steps == 0 || (a.dims.empty() && b.dims.empty())) return true;
  --*steps;
  const bool halve_b =
      a.dims.empty() ||
      (!b.dims.empty() && b.End() - b.begin > a.End() - a.begin);
  const Nest& larger = halve_b ? b : a;
  const Nest& other = halve_b ? a : b;
  const auto [count, stride] = larger.dims.front();
  const auto part = [&](uint64_t begin, uint64_t n) {
    Nest half{begin, larger.run, larger.dims, larger.number};
    half.dims.front().count = n;
    if (n == 1) half.dims.erase(half.dims.begin());
    return half;
  };
  const uint64_t half = count / 2;
  return Meet(part(larger.begin, half), other, steps) ||
         Meet(part(larger.begin + half * stride, count - half), other, steps);
}

}  // namespace

bool OverlapsItself(const SourceTensor& tensor) {
  if (tensor.bytes() == 0) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] > 1) {
      dims.emplace_back(tensor.strides[d], tensor.sizes[d]);
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = tensor.element_bytes;
  for (const auto& dim : dims) {
    if (dim.first < span) return true;
    span += (dim.second - 1) * dim.first;
  }
  return false;
}

bool SpansMeet(const std::vector<SourceTensor>& tensors) {
  std::vector<uintptr_t> begins;
  std::vector<uintptr_t> ends;
  for (const SourceTensor& tensor : tensors) {
    if (tensor.bytes() == 0) continue;
    begins.push_back(reinterpret_cast<uintptr_t>(tensor.data));
    ends.push_back(begins.back() + SpanBytes(tensor));
  }
  std::sort(begins.begin(), begins.end());
  std::sort(ends.begin(), ends.end());
  // Apart, each begins behind the ends of as many as begin before it.
  for (size_t i = 1; i < begins.size(); ++i) {
    if (begins[i] < ends[i - 1]) return true;
  }
  return false;
}

std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<SourceTensor>& tensors) {
  std::vector<Nest> nests;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].bytes() != 0) nests.push_back(NestOf(tensors[i], i));
  }
  std::sort(nests.begin(), nests.end(), [](const Nest& a, const Nest& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.number < b.number;
  });
  // Those that a chain of common addresses holds together.
  for (size_t first = 0, last = 0; first < nests.size(); first = last) {
    uint64_t reach = nests[first].End();
    for (last = first + 1; last < nests.size() && nests[last].begin < reach;
         ++last) {
      reach = std::max(reach, nests[last].End());
    }
    const std::span<const Nest> chain(nests.data() + first, last - first);
    if (chain.size() < 2 || TakeTurns(chain)) continue;
    for (size_t i = 1; i < chain.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (chain[j].End() <= chain[i].begin) continue;
        const Nest pair[] = {chain[j], chain[i]};
        uint64_t steps = kMostSteps;
        if (TakeTurns(pair) || !Meet(chain[j], chain[i], &steps)) continue;
        return std::minmax(chain[j].number, chain[i].number);
      }
    }
  }
  return std::nullopt;
}

bool ReachesInto(const SourceTensor& tensor, MutableByteSpan region) {
  if (tensor.device >= 0 || tensor.bytes() == 0 || region.empty()) return false;
  const auto first = reinterpret_cast<uintptr_t>(tensor.data);
  const auto room = reinterpret_cast<uintptr_t>(region.data());
  return first < room + region.size() && room < first + SpanBytes(tensor);
}

}  // namespace torch_ckpt::ops
