#include "plan/layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace torch_ckpt {
namespace {

uint64_t DataBytes(const SafetensorsEntry& entry) {
  // Unsigned: the shape of an empty tensor may be such that a product wraps
  // before the 0 is met.
  uint64_t elements = 1;
  for (int64_t size : entry.shape) elements *= static_cast<uint64_t>(size);
  const uint64_t bits = static_cast<uint64_t>(DtypeBits(entry.dtype));
  // By 8 elements, so that no product exceeds the number of bits by much.
  return elements / 8 * bits + (elements % 8 * bits + 7) / 8;
}

// Where an entry of `bytes` belongs; lower comes first.
int LayoutClass(const SafetensorsEntry& entry, uint64_t bytes) {
  constexpr int kEmptyClass = 1000;  // after every element size
  if (bytes == 0) return kEmptyClass;
  if (bytes % kDataAlignment == 0) return 0;
  return 1 + (64 - DtypeBits(entry.dtype));
}

}  // namespace

std::vector<uint32_t> LayOutFile(std::vector<SafetensorsEntry>* tensors) {
  struct Key {
    uint64_t bytes;
    int layout_class;
  };
  std::vector<Key> keys;
  keys.reserve(tensors->size());
  for (const SafetensorsEntry& entry : *tensors) {
    const uint64_t bytes = DataBytes(entry);
    keys.push_back({bytes, LayoutClass(entry, bytes)});
  }
  std::vector<uint32_t> order(tensors->size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::tie(keys[a].layout_class, (*tensors)[a].name) <
           std::tie(keys[b].layout_class, (*tensors)[b].name);
  });
  std::vector<SafetensorsEntry> sorted;
  sorted.reserve(tensors->size());
  uint64_t at = 0;
  for (uint32_t i : order) {
    SafetensorsEntry& entry = sorted.emplace_back(std::move((*tensors)[i]));
    entry.begin = at;
    at += keys[i].bytes;
    entry.end = at;
  }
  *tensors = std::move(sorted);
  return order;
}

}  // namespace torch_ckpt
