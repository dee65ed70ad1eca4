#include "values/cast.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace torch_ckpt {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;  // the bits of a float

// Without a branch, which would keep loops from being vectorized.
constexpr uint32_t Select(bool which, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(which);
  return (yes & mask) | (no & ~mask);
}

// A float type of at most 16 bits: sign, exponent, `mantissa` bits.
// Without the sign, `largest` is the code of what is too large (infinity, or
// the largest number where there is none) and `nan` that of a NaN.
template <class Code, int mantissa, int bias, uint32_t largest, uint32_t nan>
struct Narrow {
  using Element = Code;
  static constexpr int kShift = 23 - mantissa;
  static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Code));
  // Its mantissa is 0 then.
  static constexpr bool kHasInfinity = (largest & ((1u << mantissa) - 1)) == 0;
  // Without the sign, the bits of the smallest float that is rounded to more
  // than the largest number. That one's neighbour above is half a step away; a
  // tie goes to the even code.
  static constexpr uint32_t kLargestNumber =
      kHasInfinity ? largest - 1 : largest;
  static constexpr uint32_t kTooLarge =
      (kLargestNumber << kShift) + (static_cast<uint32_t>(127 - bias) << 23) +
      (1u << (kShift - 1)) + (kLargestNumber % 2 == 0 ? 1 : 0);

  [[gnu::always_inline]] static Code FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal: other bias, rounded at the last bit that stays.
    const uint32_t biased =
        magnitude - (static_cast<uint32_t>(127 - bias) << 23);
    uint32_t code =
        (biased + ((1u << (kShift - 1)) - 1) + ((biased >> kShift) & 1)) >>
        kShift;
    code = std::min(code, largest);
    // Subnormal: added to a power of two whose last bit is the smallest value,
    // a float is rounded to a multiple of that.
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - bias)
                                         << 23;
    constexpr auto kMagic =
        static_cast<uint32_t>(127 + 1 - bias - mantissa + 23) << 23;
    const uint32_t small =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) +
                                std::bit_cast<float>(kMagic)) -
        kMagic;
    code = Select(magnitude < kSmallestNormal, small, code);
    code = Select(magnitude > kInfinity, nan, code);
    return static_cast<Code>(code | ((bits & 0x80000000u) >> kSignShift));
  }

  [[gnu::always_inline]] static float ToFloat(Code element) {
    const uint32_t bits = element;
    const uint32_t sign = bits << kSignShift & 0x80000000u;
    const uint32_t magnitude = bits & ((1u << (8 * sizeof(Code) - 1)) - 1);
    const uint32_t field = magnitude & ((1u << mantissa) - 1);
    constexpr uint32_t kSmallest =
        static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23;
    // Signed: CPUs have no instruction for the other.
    const float subnormal = static_cast<float>(static_cast<int32_t>(field)) *
                            std::bit_cast<float>(kSmallest);
    uint32_t out =
        (magnitude << kShift) + (static_cast<uint32_t>(127 - bias) << 23);
    out = Select(magnitude < 1u << mantissa, std::bit_cast<uint32_t>(subnormal),
                 out);
    if (kHasInfinity) out = Select(magnitude == largest, kInfinity, out);
    out = Select(magnitude > largest, 0x7fc00000u, out);
    return std::bit_cast<float>(out | sign);
  }
};

using Half = Narrow<uint16_t, 10, 15, 0x7c00, 0x7e00>;
using E5M2 = Narrow<uint8_t, 2, 15, 0x7c, 0x7f>;
using E4M3 = Narrow<uint8_t, 3, 7, 0x7e, 0x7f>;

struct Bfloat {
  using Element = uint16_t;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = 0x7f7f8000;
  static uint16_t FromFloat(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(
        Select((bits & 0x7fffffffu) > kInfinity, 0x7fc0u, rounded));
  }
  static float ToFloat(uint16_t element) {
    return std::bit_cast<float>(uint32_t{element} << 16);
  }
};

struct Single {
  using Element = float;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = kInfinity;
  static float FromFloat(float value) { return value; }
  static float ToFloat(float element) { return element; }
};

struct Double {
  using Element = double;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kTooLarge = kInfinity;
  static double FromFloat(float value) { return value; }
  static float ToFloat(double element) { return static_cast<float>(element); }
};

// What the loops below hold between reading and writing: in the first cache.
constexpr size_t kBlock = 1024;

// Returns how many numbers became infinite.
template <class Type>
[[gnu::always_inline]] inline size_t ReadBlock(const std::byte* source,
                                               float* out, size_t count) {
  using Element = typename Type::Element;
  if constexpr (std::is_same_v<Element, float>) {
    std::memcpy(out, source, count * sizeof(float));
    return 0;
  }
  std::array<Element, kBlock> elements;
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
  std::array<Element, kBlock> elements;
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

// The same, compiled for the vectors of one kind of CPU.
#define TC_LOOPS(Name, target)                                     \
  template <class Type>                                            \
  struct Name {                                                    \
    target static size_t Read(const std::byte* source, float* out, \
                              size_t count) {                      \
      return ReadBlock<Type>(source, out, count);                  \
    }                                                              \
    target static size_t Write(const float* values, std::byte* to, \
                               size_t count) {                     \
      return WriteBlock<Type>(values, to, count);                  \
    }                                                              \
  };
TC_LOOPS(Portable, )
#if defined(__x86_64__)
TC_LOOPS(Avx2, __attribute__((target("avx2"))))
TC_LOOPS(Avx512,
         __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl"))))
#endif
#undef TC_LOOPS

struct Functions {
  size_t (*read)(const std::byte*, float*, size_t) = nullptr;
  size_t (*write)(const float*, std::byte*, size_t) = nullptr;
  bool has_infinity = true;
};

template <template <class> class Loops, class Type>
constexpr Functions FunctionsFor() {
  return {Loops<Type>::Read, Loops<Type>::Write, Type::kHasInfinity};
}

template <template <class> class Loops>
Functions FunctionsOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF64:
      return FunctionsFor<Loops, Double>();
    case Dtype::kF32:
      return FunctionsFor<Loops, Single>();
    case Dtype::kF16:
      return FunctionsFor<Loops, Half>();
    case Dtype::kBF16:
      return FunctionsFor<Loops, Bfloat>();
    case Dtype::kF8E4M3:
      return FunctionsFor<Loops, E4M3>();
    case Dtype::kF8E5M2:
      return FunctionsFor<Loops, E5M2>();
    default:
      return {};
  }
}

struct Implementation {
  const char* name;
  Functions (*functions)(Dtype);
};

// Those of this CPU, the best one first.
const std::vector<Implementation>& Implementations() {
  static const std::vector<Implementation> found = [] {
    std::vector<Implementation> all;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      all.push_back({"avx512", FunctionsOf<Avx512>});
    }
    if (__builtin_cpu_supports("avx2")) {
      all.push_back({"avx2", FunctionsOf<Avx2>});
    }
#endif
    all.push_back({"portable", FunctionsOf<Portable>});
    return all;
  }();
  return found;
}

size_t CastBy(const Implementation& implementation, Dtype from,
              const std::byte* source, Dtype to, std::byte* target,
              size_t count) {
  const auto source_bytes = static_cast<size_t>(DtypeBits(from)) / 8;
  const auto target_bytes = static_cast<size_t>(DtypeBits(to)) / 8;
  const Functions in = implementation.functions(from);
  const Functions out = implementation.functions(to);
  std::array<float, kBlock> values;
  size_t lost = 0;
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t size = std::min(kBlock, count - at);
    const size_t infinite =
        in.read(source + at * source_bytes, values.data(), size);
    lost += out.write(values.data(), target + at * target_bytes, size);
    if (out.has_infinity) lost += infinite;  // else counted as too large
  }
  return lost;
}

}  // namespace

bool CanCast(Dtype from, Dtype to) {
  return FunctionsOf<Portable>(from).read != nullptr &&
         FunctionsOf<Portable>(to).write != nullptr;
}

size_t CastElements(Dtype from, const std::byte* source, Dtype to,
                    std::byte* target, size_t count) {
  return CastBy(Implementations().front(), from, source, to, target, count);
}

Converter::Converter(std::string fqn, Dtype from, Dtype to)
    : fqn_(std::move(fqn)),
      from_(from),
      to_(to),
      from_bytes_(static_cast<uint64_t>(DtypeBits(from)) / 8),
      to_bytes_(static_cast<uint64_t>(DtypeBits(to)) / 8) {}

Status Converter::Check() const {
  const uint64_t lost = lost_;
  if (lost == 0) return {};
  return InvalidArgument("at least " + std::to_string(lost) + " values of " +
                         DtypeName(from_) + " would be out of range as " +
                         DtypeName(to_))
      .WithTensor(fqn_);
}

std::optional<size_t> CastElementsBy(std::string_view implementation,
                                     Dtype from, const std::byte* source,
                                     Dtype to, std::byte* target,
                                     size_t count) {
  for (const Implementation& one : Implementations()) {
    if (implementation == one.name) {
      return CastBy(one, from, source, to, target, count);
    }
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
