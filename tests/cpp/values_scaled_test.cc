// Codes and scales to floats, against the definition of each.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "values/cast.h"
#include "values/scaled.h"

namespace torch_ckpt {
namespace {

constexpr const char* kImplementations[] = {"portable", "avx2", "avx512"};

float CodeValue(Dtype dtype, const std::vector<std::byte>& codes, size_t at) {
  if (dtype == Dtype::kF4) {
    constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int both = std::to_integer<int>(codes[at / 2]);
    const int code = at % 2 == 0 ? both & 15 : both >> 4;
    return code & 8 ? -kValues[code & 7] : kValues[code];
  }
  float value = 0;
  CastElements(dtype, &codes[at], Dtype::kF32,
               reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

float ScaleValue(Dtype dtype, const std::byte* scales, size_t at) {
  if (dtype == Dtype::kF8E8M0) {
    const int code = std::to_integer<int>(scales[at]);
    return code == 255 ? std::numeric_limits<float>::quiet_NaN()
                       : static_cast<float>(std::ldexp(1.0, code - 127));
  }
  const size_t bytes = static_cast<size_t>(DtypeBits(dtype)) / 8;
  float value = 0;
  CastElements(dtype, scales + at * bytes, Dtype::kF32,
               reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

// The number of the block of an element, among `sizes` blocks of the tensor.
size_t BlockOf(size_t element, const Dims& shape, const Dims& blocks,
               const Box& held) {
  size_t at = 0, stride = 1;
  for (int d = shape.size() - 1; d >= 0; --d) {
    const auto size = static_cast<size_t>(shape[d]);
    const auto block = static_cast<int64_t>(element % size) / blocks[d];
    at += static_cast<size_t>(block - held.offsets[d]) * stride;
    stride *= static_cast<size_t>(held.sizes[d]);
    element /= size;
  }
  return at;
}

struct Case {
  Dtype codes, scales, to;
  Dims shape, blocks;
  Box box;
};

void Fill(std::mt19937* random, Dtype dtype, MutableByteSpan bytes) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((*random)());
  if (dtype != Dtype::kF32 && dtype != Dtype::kBF16 && dtype != Dtype::kF16) {
    return;
  }
  // Numbers of all sizes that are common, and rarely something else.
  const size_t width = static_cast<size_t>(DtypeBits(dtype)) / 8;
  for (size_t i = 0; i + width <= bytes.size(); i += width) {
    if ((*random)() % 50 == 0) continue;
    const float value =
        std::ldexp(1.0F + static_cast<float>((*random)() % 1000) / 1000,
                   static_cast<int>((*random)() % 24) - 16);
    CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(&value), dtype,
                 bytes.data() + i, 1);
  }
}

void Check(std::mt19937* random, const Case& c) {
  const auto total = static_cast<size_t>(Box::Whole(c.shape).Volume());
  std::vector<std::byte> codes((total * DtypeBits(c.codes) + 7) / 8);
  Fill(random, c.codes, codes);
  Scales scales(c.scales, c.shape, c.blocks, c.box);
  Fill(random, c.scales, scales.bytes());
  const size_t even = c.codes == Dtype::kF4 ? 2 : 1;
  // Rows of the box, each of its columns from one on.
  const size_t columns =
      c.shape.empty() ? 1 : static_cast<size_t>(c.shape[c.shape.size() - 1]);
  for (size_t row = 0; row < total / columns; ++row) {
    const size_t first = row * columns;
    // Whether it is one of the box.
    size_t rest = row;
    bool inside = true;
    for (int d = c.shape.size() - 2; d >= 0; --d) {
      const auto at = static_cast<int64_t>(rest % size_t(c.shape[d]));
      inside = inside && at >= c.box.offsets[d] &&
               at < c.box.offsets[d] + c.box.sizes[d];
      rest /= static_cast<size_t>(c.shape[d]);
    }
    if (!inside) continue;
    size_t lo = 0, count = 1;
    if (!c.shape.empty()) {
      const int last = c.shape.size() - 1;
      lo = static_cast<size_t>(c.box.offsets[last]);
      const auto size = static_cast<size_t>(c.box.sizes[last]);
      const size_t skip = (*random)() % size / even * even;
      lo += skip;
      count = size - skip;
    }
    const size_t width = static_cast<size_t>(DtypeBits(c.to)) / 8;
    std::vector<std::byte> wanted(count * width), got(count * width + 1);
    size_t lost = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t element = first + lo + i;
      const float code = CodeValue(c.codes, codes, element);
      const float scale =
          ScaleValue(c.scales, scales.bytes().data(),
                     BlockOf(element, c.shape, c.blocks, scales.held()));
      const float product = code * scale;
      if (std::isinf(product) && !std::isinf(code) && !std::isinf(scale)) {
        ++lost;
      }
      lost += CastElements(Dtype::kF32,
                           reinterpret_cast<const std::byte*>(&product), c.to,
                           &wanted[i * width], 1);
    }
    for (const char* name : kImplementations) {
      const auto found =
          ScaleBy(name, scales, c.codes,
                  codes.data() + (first + lo) * size_t(DtypeBits(c.codes)) / 8,
                  c.to, got.data() + 1, first + lo, count);
      if (!found) continue;
      EXPECT_EQ(*found, lost) << name;
      for (size_t i = 0; i < count; ++i) {
        double a = 0, b = 0;  // NaNs have any bits
        CastElements(c.to, &wanted[i * width], Dtype::kF64,
                     reinterpret_cast<std::byte*>(&a), 1);
        CastElements(c.to, &got[1 + i * width], Dtype::kF64,
                     reinterpret_cast<std::byte*>(&b), 1);
        const bool same =
            std::memcmp(&wanted[i * width], &got[1 + i * width], width) == 0;
        EXPECT_TRUE(same || (std::isnan(a) && std::isnan(b)))
            << name << " " << a << " " << b;
      }
    }
  }
}

TEST(Scaled, EveryKindIsTheProductRoundedOnce) {
  std::mt19937 random(11);
  constexpr Dtype kCodes[] = {Dtype::kF8E4M3, Dtype::kF8E5M2, Dtype::kF4};
  constexpr Dtype kScales[] = {Dtype::kF32, Dtype::kBF16, Dtype::kF16,
                               Dtype::kF8E8M0};
  constexpr Dtype kTo[] = {Dtype::kF64, Dtype::kF32, Dtype::kBF16, Dtype::kF16};
  const auto up_to = [&](int64_t most) {
    return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most));
  };
  for (const Dtype codes : kCodes) {
    for (const Dtype scales : kScales) {
      for (const Dtype to : kTo) {
        ASSERT_TRUE(CanScale(codes, scales, to));
        for (int round = 0; round < 4; ++round) {
          Case c{codes, scales, to, {}, {}, {}};
          const int rank = codes == Dtype::kF4 ? 1 + round % 3 : round;
          Dims offsets, sizes;
          for (int d = 0; d < rank; ++d) {
            const bool last = d == rank - 1;
            int64_t size = last ? up_to(2500) : up_to(7);
            int64_t block = last ? up_to(300) : up_to(4);
            if (last && random() % 3 == 0) block = size;  // one for the row
            int64_t offset = up_to(size) - 1;
            if (codes == Dtype::kF4 && last) {
              size += size % 2;
              offset -= offset % 2;
            }
            int64_t taken = up_to(size - offset);
            if (codes == Dtype::kF4 && last) taken += taken % 2;
            c.shape.push_back(size);
            c.blocks.push_back(block);
            offsets.push_back(offset);
            sizes.push_back(taken);
          }
          c.box = {offsets, sizes};
          Check(&random, c);
        }
      }
    }
  }
}

TEST(Scaled, ProductsThatBecomeInfiniteAreLost) {
  Scales scales(Dtype::kF32, {4}, {4}, Box::Whole({4}));
  const float large = 3e38F;
  std::memcpy(scales.bytes().data(), &large, sizeof large);
  const std::vector<std::byte> codes = {std::byte{0x7e}, std::byte{0x38},
                                        std::byte{0xfe}, std::byte{0x7f}};
  std::vector<std::byte> out(16);
  EXPECT_EQ(
      scales.Scale(Dtype::kF8E4M3, codes.data(), Dtype::kF32, out.data(), 0, 4),
      2U);  // 448 twice; 1 is large, and NaN is none
}

TEST(Scaled, WhatCannotBeScaled) {
  EXPECT_FALSE(CanScale(Dtype::kU8, Dtype::kF32, Dtype::kF32));
  EXPECT_FALSE(CanScale(Dtype::kF8E4M3, Dtype::kU8, Dtype::kF32));
  EXPECT_FALSE(CanScale(Dtype::kF8E4M3, Dtype::kF32, Dtype::kF8E4M3));
}

}  // namespace
}  // namespace torch_ckpt
