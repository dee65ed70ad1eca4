// Values against arithmetic in double, which shares nothing with the casts.
// tests/python compares them with torch's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "values/cast.h"

namespace torch_ckpt {
namespace {

constexpr Dtype kFloats[] = {Dtype::kF64,  Dtype::kF32,    Dtype::kF16,
                             Dtype::kBF16, Dtype::kF8E4M3, Dtype::kF8E5M2};

struct Format {
  int mantissa, min_exponent;  // of the smallest normal number
  double largest;
  bool has_infinity;
};

Format FormatOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
      return {10, -14, 65504, true};
    case Dtype::kBF16:
      return {7, -126, std::ldexp(255.0 / 128, 127), true};
    case Dtype::kF8E4M3:
      return {3, -6, 448, false};
    case Dtype::kF8E5M2:
      return {2, -14, 57344, true};
    default:
      return {23, -126, std::numeric_limits<float>::max(), true};
  }
}

// The nearest number of the format, by arithmetic.
double Rounded(double value, const Format& format) {
  if (std::isinf(value) && !format.has_infinity) {
    return std::copysign(format.largest, value);
  }
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double unit = std::ldexp(1.0, exponent - format.mantissa);
  const double out = std::nearbyint(value / unit) * unit;  // ties to even
  if (std::abs(out) <= format.largest) return out;
  return std::copysign(format.has_infinity ? INFINITY : format.largest, value);
}

double Decode(Dtype dtype, const std::byte* from) {
  double out = 0;
  CastElements(dtype, from, Dtype::kF64, reinterpret_cast<std::byte*>(&out), 1);
  return out;
}

void ExpectSame(double a, double b, const char* what) {
  if (std::isnan(a) || std::isnan(b)) {
    EXPECT_TRUE(std::isnan(a) && std::isnan(b)) << what << a << " " << b;
  } else {
    EXPECT_EQ(a, b) << what;
    EXPECT_EQ(std::signbit(a), std::signbit(b)) << what;
  }
}

std::vector<float> Samples() {
  std::vector<float> values = {0,     -0.0f, INFINITY, -INFINITY, NAN,   1,
                               -1,    448,   464,      480,       57344, 61440,
                               65504, 65519, 65520,    1e-45f,    3e-8f};
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    float value;
    std::memcpy(&value, &bits, sizeof value);
    values.push_back(value);
    // Where the narrow types have their numbers, and ties between them.
    values.push_back(std::ldexp(static_cast<float>(random() % 64) / 8,
                                static_cast<int>(random() % 50) - 30));
  }
  return values;
}

TEST(CastElements, RoundsToTheNearestNumberOfEveryFormat) {
  const std::vector<float> values = Samples();
  for (const Dtype to : kFloats) {
    if (to == Dtype::kF64) continue;
    std::vector<std::byte> out(values.size() * 4);
    CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()),
                 to, out.data(), values.size());
    const auto bytes = static_cast<size_t>(DtypeBits(to)) / 8;
    for (size_t i = 0; i < values.size(); ++i) {
      ExpectSame(Decode(to, out.data() + i * bytes),
                 Rounded(values[i], FormatOf(to)), DtypeName(to));
    }
  }
}

// Of all types: every code of the narrow ones, random bits of the others.
std::vector<std::byte> Elements(Dtype dtype) {
  const auto bytes = static_cast<size_t>(DtypeBits(dtype)) / 8;
  std::vector<std::byte> out;
  std::mt19937_64 random(11);
  for (uint64_t i = 0; i < 70001; ++i) {
    // Some of the magnitude of floats, for doubles.
    uint64_t bits = bytes < 4 ? i : random();
    if (bytes == 8 && i % 2 == 0) {
      bits = (bits & ~(uint64_t{0x7ff} << 52)) | ((800 + i % 400) << 52);
    }
    std::byte element[8];
    std::memcpy(element, &bits, sizeof element);
    out.insert(out.end(), element, element + bytes);
  }
  return out;
}

TEST(CastElements, VectorsOfEveryCpuCastAlike) {
  for (const Dtype from : kFloats) {
    const std::vector<std::byte> in = Elements(from);
    const size_t count = in.size() * 8 / static_cast<size_t>(DtypeBits(from));
    for (const Dtype to : kFloats) {
      if (from == to) continue;
      const size_t size = count * static_cast<size_t>(DtypeBits(to)) / 8;
      std::vector<std::byte> wanted(size), out(size);
      const auto lost =
          CastElementsBy("portable", from, in.data(), to, wanted.data(), count);
      ASSERT_TRUE(lost);
      for (const char* implementation : {"avx2", "avx512"}) {
        const auto found = CastElementsBy(implementation, from, in.data(), to,
                                          out.data(), count);
        if (!found) continue;
        EXPECT_EQ(*found, *lost) << implementation;
        EXPECT_TRUE(out == wanted)
            << implementation << " " << DtypeName(from) << " " << DtypeName(to);
      }
    }
  }
  EXPECT_FALSE(
      CastElementsBy("abacus", Dtype::kF32, nullptr, Dtype::kBF16, nullptr, 0));
}

TEST(CastElements, CountsWhatIsLost) {
  std::vector<float> values = Samples();
  for (const Dtype to : kFloats) {
    if (to == Dtype::kF64) continue;
    const Format format = FormatOf(to);
    // Each alone, and all at once.
    size_t lost = 0;
    std::vector<std::byte> out(values.size() * 4);
    for (const float& value : values) {
      const double was = value;
      // Without its bound: the nearest of numbers that go on above the largest.
      Format endless = format;
      endless.largest = INFINITY;
      const bool gone = std::isinf(was)
                            ? !format.has_infinity
                            : std::abs(Rounded(was, endless)) > format.largest;
      EXPECT_EQ(
          CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(&value),
                       to, out.data(), 1),
          gone ? 1u : 0u)
          << DtypeName(to) << " " << value;
      lost += gone ? 1 : 0;
    }
    EXPECT_EQ(CastElements(Dtype::kF32,
                           reinterpret_cast<const std::byte*>(values.data()),
                           to, out.data(), values.size()),
              lost);
    EXPECT_EQ(lost > 0, to != Dtype::kF32);
  }
  const double wide[] = {1e39, -1e300, INFINITY, NAN, 3e38};
  std::vector<std::byte> out(sizeof wide);
  for (const auto& [to, lost] :
       {std::pair(Dtype::kF32, 2u), {Dtype::kF16, 3u}, {Dtype::kF8E4M3, 4u}}) {
    EXPECT_EQ(
        CastElements(Dtype::kF64, reinterpret_cast<const std::byte*>(wide), to,
                     out.data(), std::size(wide)),
        lost)
        << DtypeName(to);
  }
}

TEST(CastElements, EveryNarrowNumberComesBack) {
  for (const Dtype dtype : kFloats) {
    const int bits = DtypeBits(dtype);
    if (bits > 16) continue;
    for (uint32_t code = 0; code < 1u << bits; ++code) {
      std::byte in[2], out[2];
      std::memcpy(in, &code, sizeof in);
      double value = Decode(dtype, in);
      CastElements(Dtype::kF64, reinterpret_cast<std::byte*>(&value), dtype,
                   out, 1);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(Decode(dtype, out)));
      } else {
        EXPECT_EQ(std::memcmp(in, out, static_cast<size_t>(bits) / 8), 0)
            << DtypeName(dtype) << " " << code;
      }
    }
  }
}

TEST(CastElements, AnyCountFromAnyAddress) {
  for (const size_t count : {0u, 1u, 1023u, 1024u, 1025u, 5000u}) {
    std::vector<std::byte> in(count * 4 + 1), out(count * 2 + 1, std::byte{9});
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(i % 256);
      std::memcpy(in.data() + 1 + i * 4, &value, sizeof value);
    }
    CastElements(Dtype::kF32, in.data() + 1, Dtype::kBF16, out.data() + 1,
                 count);
    EXPECT_EQ(out[0], std::byte{9});
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(Decode(Dtype::kBF16, out.data() + 1 + i * 2),
                static_cast<double>(i % 256));
    }
  }
}

TEST(CanCast, FloatsAndNothingElse) {
  for (int from = 0; from < kDtypeCount; ++from) {
    for (int to = 0; to < kDtypeCount; ++to) {
      const auto is_float = [](int dtype) {
        return std::find(std::begin(kFloats), std::end(kFloats),
                         static_cast<Dtype>(dtype)) != std::end(kFloats);
      };
      EXPECT_EQ(CanCast(static_cast<Dtype>(from), static_cast<Dtype>(to)),
                is_float(from) && is_float(to));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
