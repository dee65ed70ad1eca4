// Stretches of memory, none of which touches another.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <utility>

namespace torch_ckpt {

using Stretches = std::map<std::byte*, size_t>;  // size by begin

// Adds one that overlaps none, joined with its neighbours. Throws
// std::bad_alloc, and has changed nothing then, only where it has none.
inline void AddStretch(Stretches* stretches, std::byte* data, size_t size) {
  auto next = stretches->lower_bound(data);
  if (next != stretches->begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == data) {
      before->second += size;
      if (next != stretches->end() && data + size == next->first) {
        before->second += next->second;
        stretches->erase(next);
      }
      return;
    }
  }
  if (next != stretches->end() && data + size == next->first) {
    auto node = stretches->extract(next);
    node.key() = data;
    node.mapped() += size;
    stretches->insert(std::move(node));
    return;
  }
  stretches->emplace_hint(next, data, size);
}

}  // namespace torch_ckpt
