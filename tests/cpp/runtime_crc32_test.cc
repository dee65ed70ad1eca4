#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "crc_test_util.h"
#include "runtime/crc32.h"

namespace torch_ckpt {
namespace {

uint32_t Bitwise(uint32_t crc, const unsigned char* p, size_t n) {
  return BitwiseCrc(0xedb88320, crc, p, n);
}

TEST(Crc32Test, KnownValues) {
  EXPECT_EQ(Crc32(0, "", 0), 0u);
  EXPECT_EQ(Crc32(0, nullptr, 0), 0u);
  EXPECT_EQ(Crc32(0, "123456789", 9), 0xcbf43926u);
  const std::string zeros(32, '\0');
  EXPECT_EQ(Crc32(0, zeros.data(), zeros.size()), 0x190a55adu);
}

// Every implementation that the CPU has, not only the one that is chosen.
class Crc32BySuite : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!Crc32By(GetParam(), 0, "", 0)) GTEST_SKIP() << "not on this CPU";
  }
  uint32_t Run(uint32_t crc, const void* data, size_t n) {
    return *Crc32By(GetParam(), crc, data, n);
  }
};

TEST_P(Crc32BySuite, EveryLengthAndAlignmentAgreesWithTheDefinition) {
  constexpr size_t kLongest = 2000;
  const auto data = CrcInput(kLongest + 64, 1);
  for (size_t at = 0; at < 64; ++at) {
    const unsigned char* const p = data.data() + at;
    const uint32_t start = static_cast<uint32_t>(at * 2654435761u);
    uint32_t expected = start;
    for (size_t n = 0; n <= kLongest; ++n) {
      ASSERT_EQ(Run(start, p, n), expected) << at << " " << n;
      expected = Bitwise(expected, p + n, 1);
    }
  }
}

TEST_P(Crc32BySuite, LongOnesAgreeWithTheDefinition) {
  const auto data = CrcInput(300'000, 2);
  std::mt19937 random(3);
  for (int i = 0; i < 20; ++i) {
    const size_t at = random() % 1000;
    const size_t n = random() % (data.size() - at);
    const uint32_t start = static_cast<uint32_t>(random());
    ASSERT_EQ(Run(start, data.data() + at, n),
              Bitwise(start, data.data() + at, n))
        << at << " " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Crc32BySuite,
                         ::testing::Values("pclmulqdq", "vpclmulqdq",
                                           "armv8-crc", "portable"),
                         [](const auto& name) {
                           std::string text = name.param;
                           std::erase(text, '-');
                           return text;
                         });

TEST(Crc32Test, GoesOnWhereItStoppedAndCombines) {
  const auto data = CrcInput(20000, 4);
  const uint32_t whole = Crc32(0, data.data(), data.size());
  for (size_t cut = 0; cut <= data.size(); cut += cut < 300 ? 1 : 997) {
    const unsigned char* const rest = data.data() + cut;
    const uint32_t first = Crc32(0, data.data(), cut);
    EXPECT_EQ(Crc32(first, rest, data.size() - cut), whole) << cut;
    const uint32_t second = Crc32(0, rest, data.size() - cut);
    EXPECT_EQ(Crc32Combine(first, second, data.size() - cut), whole) << cut;
  }
}

TEST(Crc32Test, CombinesOverHugeLengths) {
  // x^(2^32 - 1) is 1 modulo the polynomial, which is primitive: as many bits
  // change nothing of what went before, nor do as many bytes.
  const uint32_t a = Crc32(0, "123456789", 9), b = Crc32(0, "abc", 3);
  EXPECT_EQ(Crc32Combine(a, b, 0xffffffff), a ^ b);
  EXPECT_EQ(Crc32Combine(a, b, (uint64_t{0xffffffff} << 20) + 3),
            Crc32Combine(a, b, 3));
}

// The other tests pass on the table as well, at a tenth of the speed.
TEST(Crc32Test, IsNeverTheTableWhereTheCpuHasBetter) {
  const std::string name = Crc32Implementation();
  for (const char* better : {"pclmulqdq", "vpclmulqdq", "armv8-crc"}) {
    if (Crc32By(better, 0, "", 0)) {
      EXPECT_NE(name, "portable");
    }
  }
#if defined(__x86_64__)
  EXPECT_EQ(name != "portable", __builtin_cpu_supports("pclmul") != 0) << name;
#endif
}

}  // namespace
}  // namespace torch_ckpt
