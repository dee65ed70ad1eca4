#include "values/float_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "values/float_types.h"

namespace torch_ckpt {
namespace {

using float_types::Bfloat;
using float_types::Double;
using float_types::E2M1;
using float_types::E4M3;
using float_types::E5M2;
using float_types::E8M0;
using float_types::Half;
using float_types::kInfinity;
using float_types::Single;

// Returns how many numbers became infinite.
template <class Type>
[[gnu::always_inline]] inline size_t ReadBlock(const std::byte* source,
                                               float* out, size_t count) {
  using Element = typename Type::Element;
  if constexpr (std::is_same_v<Element, float>) {
    std::memcpy(out, source, count * sizeof(float));
    return 0;
  }
  std::array<Element, kFloatsAtOnce> elements;
  std::memcpy(elements.data(), source, count * sizeof(Element));
  for (size_t i = 0; i < count; ++i) out[i] = Type::ToFloat(elements[i]);
  if constexpr (sizeof(Element) <= sizeof(float)) return 0;
  uint32_t lost = 0;
  for (size_t i = 0; i < count; ++i) {
    lost += std::isinf(out[i]) && !std::isinf(elements[i]) ? 1 : 0;
  }
  return lost;
}

// Returns how many values are too large.
template <class Type>
[[gnu::always_inline]] inline size_t WriteBlock(const float* values,
                                                std::byte* target,
                                                size_t count) {
  using Element = typename Type::Element;
  std::array<Element, kFloatsAtOnce> elements;
  for (size_t i = 0; i < count; ++i) elements[i] = Type::FromFloat(values[i]);
  std::memcpy(target, elements.data(), count * sizeof(Element));
  // NaNs are above kInfinity.
  constexpr uint32_t kEnd = Type::kHasInfinity ? kInfinity : kInfinity + 1;
  uint32_t lost = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
    lost += magnitude - Type::kTooLarge < kEnd - Type::kTooLarge ? 1 : 0;
  }
  return lost;
}

// As ReadBlock, each multiplied by its scale: `block` elements have one, of the
// first of which `into` are left out.
template <class Type>
[[gnu::always_inline]] inline void ReadScaledBlock(const std::byte* source,
                                                   const float* scales,
                                                   size_t into, size_t block,
                                                   float* out, size_t count) {
  std::array<uint8_t, kFloatsAtOnce> codes;
  if constexpr (std::is_same_v<Type, E2M1>) {
    for (size_t i = 0; i < count / 2; ++i) {
      const auto both = std::to_integer<uint8_t>(source[i]);
      codes[2 * i] = both & 15;
      codes[2 * i + 1] = both >> 4;
    }
  } else {
    std::memcpy(codes.data(), source, count);
  }
  constexpr size_t kMx = 32;  // a loop of that length has no end to look for
  size_t at = 0;
  for (; block == kMx && into == 0 && at + kMx <= count; at += kMx) {
    const float scale = *scales++;
    for (size_t i = 0; i < kMx; ++i) {
      out[at + i] = Type::ToFloat(codes[at + i]) * scale;
    }
  }
  for (; at < count; ++scales, into = 0) {
    const size_t end = std::min(count, at + (block - into));
    const float scale = *scales;
    for (; at < end; ++at) out[at] = Type::ToFloat(codes[at]) * scale;
  }
}

// The same, compiled for the vectors of one kind of CPU.
#define TC_LOOPS(Name, target)                                              \
  template <class Type>                                                     \
  struct Name {                                                             \
    target static size_t Read(const std::byte* source, float* out,          \
                              size_t count) {                               \
      return ReadBlock<Type>(source, out, count);                           \
    }                                                                       \
    target static void ReadScaled(const std::byte* source,                  \
                                  const float* scales, size_t into,         \
                                  size_t block, float* out, size_t count) { \
      ReadScaledBlock<Type>(source, scales, into, block, out, count);       \
    }                                                                       \
    target static size_t Write(const float* values, std::byte* to,          \
                               size_t count) {                              \
      return WriteBlock<Type>(values, to, count);                           \
    }                                                                       \
  };
TC_LOOPS(Portable, )
#if defined(__x86_64__)
TC_LOOPS(Avx2, __attribute__((target("avx2"))))
TC_LOOPS(Avx512,
         __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl"))))
#endif
#undef TC_LOOPS

template <template <class> class Loops, class Type>
constexpr FloatLoops LoopsFor() {
  FloatLoops loops{Loops<Type>::Read, nullptr, Loops<Type>::Write,
                   Type::kHasInfinity};
  if constexpr (sizeof(typename Type::Element) == 1) {
    loops.read_scaled = Loops<Type>::ReadScaled;
  }
  return loops;
}

template <template <class> class Loops>
FloatLoops LoopsOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF64:
      return LoopsFor<Loops, Double>();
    case Dtype::kF32:
      return LoopsFor<Loops, Single>();
    case Dtype::kF16:
      return LoopsFor<Loops, Half>();
    case Dtype::kBF16:
      return LoopsFor<Loops, Bfloat>();
    case Dtype::kF8E4M3:
      return LoopsFor<Loops, E4M3>();
    case Dtype::kF8E5M2:
      return LoopsFor<Loops, E5M2>();
    case Dtype::kF8E8M0:
      return {Loops<E8M0>::Read, nullptr, nullptr, true};
    case Dtype::kF4:
      return {nullptr, Loops<E2M1>::ReadScaled, nullptr, true};
    default:
      return {};
  }
}

}  // namespace

const std::vector<FloatImplementation>& FloatImplementations() {
  static const std::vector<FloatImplementation> found = [] {
    std::vector<FloatImplementation> all;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      all.push_back({"avx512", LoopsOf<Avx512>});
    }
    if (__builtin_cpu_supports("avx2")) {
      all.push_back({"avx2", LoopsOf<Avx2>});
    }
#endif
    all.push_back({"portable", LoopsOf<Portable>});
    return all;
  }();
  return found;
}

}  // namespace torch_ckpt
