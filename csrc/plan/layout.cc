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

// Where a tensor belongs; lower comes first.
int LayoutClass(const LayoutKey& key) {
  constexpr int kEmptyClass = 1000;  // after every element size
  if (key.bytes == 0) return kEmptyClass;
  if (key.bytes % kDataAlignment == 0) return 0;
  return 1 + (128 - key.element_bits);
}

}  // namespace

std::vector<uint32_t> FileOrder(const std::vector<LayoutKey>& keys) {
  std::vector<int> classes;
  classes.reserve(keys.size());
  for (const LayoutKey& key : keys) classes.push_back(LayoutClass(key));
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::tie(classes[a], keys[a].name) <
           std::tie(classes[b], keys[b].name);
  });
  return order;
}

std::vector<uint32_t> LayOutFile(std::vector<SafetensorsEntry>* tensors) {
  std::vector<LayoutKey> keys;
  keys.reserve(tensors->size());
  for (const SafetensorsEntry& entry : *tensors) {
    keys.push_back({DataBytes(entry), DtypeBits(entry.dtype), entry.name});
  }
  std::vector<uint32_t> order = FileOrder(keys);
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
