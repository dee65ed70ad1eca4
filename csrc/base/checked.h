// Integer arithmetic on untrusted numbers: every overflow is seen.
#pragma once

#include <cstdint>
#include <optional>

namespace torch_ckpt {

template <class T>
std::optional<T> CheckedAdd(T a, T b) {
  T out;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <class T>
std::optional<T> CheckedMul(T a, T b) {
  T out;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// Callers pass trusted, small alignments; value + alignment must not overflow.
constexpr uint64_t RoundUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
constexpr uint64_t RoundDown(uint64_t value, uint64_t alignment) {
  return value / alignment * alignment;
}

}  // namespace torch_ckpt
