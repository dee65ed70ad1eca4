#include "ops/overlap.h"

#include <algorithm>
#include <cstdint>

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
  std::vector<size_t> order;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].bytes() != 0) order.push_back(i);
  }
  const auto begin = [&](size_t i) {
    return reinterpret_cast<uintptr_t>(tensors[i].data);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return begin(a) != begin(b) ? begin(a) < begin(b) : a < b;
  });
  // Where the last one ends, which holds every byte up to there: all of one
  // piece of memory, the first element of any other.
  size_t last = 0;
  uintptr_t end = 0;
  for (const size_t i : order) {
    if (begin(i) < end) {
      return std::pair(std::min(last, i), std::max(last, i));
    }
    const uint64_t span = SpanBytes(tensors[i]);
    const bool whole = span == tensors[i].bytes();
    last = i;
    end = begin(i) +
          (whole ? span : static_cast<uint64_t>(tensors[i].element_bytes));
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
