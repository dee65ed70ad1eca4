#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "crc_test_util.h"
#include "runtime/crc32c.h"
#include "sanitizers.h"

namespace torch_ckpt {
namespace {

uint32_t Bitwise(const unsigned char* p, size_t n) {
  return BitwiseCrc(0x82f63b78, 0, p, n);
}

uint32_t Portable(uint32_t crc, const void* data, size_t n) {
  return *Crc32cBy("portable", crc, data, n);
}

TEST(Crc32c, KnownValues) {
  // The check value, and the vectors of RFC 3720, B.4.
  EXPECT_EQ(Crc32c(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, "", 0), 0u);
  const std::string zeros(32, '\0'), ones(32, '\xff');
  EXPECT_EQ(Crc32c(0, zeros.data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, ones.data(), 32), 0x62a8ab43u);
  std::string up(32, 0), down(32, 0);
  for (size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<char>(i);
    down[i] = static_cast<char>(31 - i);
  }
  EXPECT_EQ(Crc32c(0, up.data(), 32), 0x46dd794eu);
  EXPECT_EQ(Portable(0, down.data(), 32), 0x113fdb5cu);
}

TEST(Crc32c, PortableAgreesWithTheDefinition) {
  const auto data = CrcInput(300, 1);
  for (size_t n = 0; n <= data.size(); ++n) {
    ASSERT_EQ(Portable(0, data.data(), n), Bitwise(data.data(), n)) << n;
  }
}

// Every implementation that the CPU has, not only the one that is chosen.
class Crc32cBySuite : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!Crc32cBy(GetParam(), 0, "", 0)) {
      GTEST_SKIP() << "not on this CPU";
    }
  }
  uint32_t Run(uint32_t crc, const void* data, size_t n) {
    return *Crc32cBy(GetParam(), crc, data, n);
  }
};

TEST_P(Crc32cBySuite, EveryLengthAgreesWithPortable) {
  const auto data = CrcInput(4096 + 64, 2);
  for (size_t n = 0; n <= 4096; ++n) {
    const unsigned char* p = data.data() + n % 64;
    ASSERT_EQ(Run(0, p, n), Portable(0, p, n)) << n;
  }
}

TEST_P(Crc32cBySuite, EveryAlignmentAgreesWithPortable) {
  constexpr size_t kLengths[] = {0,   7,    8,    255,   511,   512,   767,
                                 768, 1023, 4096, 12287, 12288, 12289, 39900};
  const auto data = CrcInput(40000, 3);
  for (size_t at = 0; at < 64; ++at) {
    for (const size_t n : kLengths) {
      const uint32_t start = static_cast<uint32_t>(at * 2654435761u);
      ASSERT_EQ(Run(start, data.data() + at, n),
                Portable(start, data.data() + at, n))
          << at << " " << n;
    }
  }
}

TEST_P(Crc32cBySuite, CopiesOfEveryAlignmentAgreeAndTouchNothingElse) {
  constexpr size_t kRoom = 64;  // around the copy
  constexpr size_t kLengths[] = {0,     1,     63,    64,    255,  256,  511,
                                 512,   8191,  8192,  8193,  8447, 8448, 8511,
                                 12288, 12351, 12352, 16384, 69900};
  const auto data = CrcInput(70000, 5);
  for (size_t at = 0; at < 64; ++at) {
    for (const size_t n : kLengths) {
      for (size_t to : {size_t{0}, size_t{1}, at}) {
        std::vector<unsigned char> out(n + 3 * kRoom, 0x5a);
        const uint32_t start = static_cast<uint32_t>(at * 2654435761u);
        const auto crc = Crc32cCopyBy(
            GetParam(), start, out.data() + kRoom + to, data.data() + at, n);
        ASSERT_EQ(*crc, Run(start, data.data() + at, n)) << at << " " << n;
        std::vector<unsigned char> expected(out.size(), 0x5a);
        std::copy_n(data.begin() + static_cast<ptrdiff_t>(at), n,
                    expected.begin() + static_cast<ptrdiff_t>(kRoom + to));
        ASSERT_TRUE(out == expected) << at << " " << n << " " << to;
      }
    }
  }
}

// Somebody changes the source meanwhile, as a trainer may, in a process of its
// own here: what is digested is what was copied.
TEST_P(Crc32cBySuite, TheDigestIsOfTheCopy) {
  constexpr size_t kBytes = 256 << 10;
  auto* const from =
      static_cast<unsigned char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(from, MAP_FAILED);
  const pid_t child = fork();
  if (child == 0) {
    for (unsigned char value = 0;; ++value) std::memset(from, value, kBytes);
  }
  std::vector<unsigned char> to(kBytes);
  for (int i = 0; i < 300 && !HasFailure(); ++i) {
    const auto crc = Crc32cCopyBy(GetParam(), 0, to.data(), from, kBytes);
    EXPECT_EQ(*crc, Run(0, to.data(), kBytes)) << i;
  }
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  munmap(from, kBytes);
}

// Stores that miss the caches in parts of lines once took twice as long as the
// portable copy, on CPUs of a kind that no test had run on.
TEST_P(Crc32cBySuite, ACopyTakesLittleLongerThanThePortableOne) {
  if (GetParam() == std::string("portable")) {
    GTEST_SKIP() << "that is this one";
  }
  if (kSanitized || std::getenv("TORCH_CKPT_TEST_RUNNER") != nullptr) {
    GTEST_SKIP() << "instrumented code, and an emulated CPU, have times of "
                    "their own";
  }
  const auto from = CrcInput(size_t{4} << 20, 7);
  std::vector<unsigned char> to(from.size());
  const auto time = [&](const char* name) {
    const auto start = std::chrono::steady_clock::now();
    (void)Crc32cCopyBy(name, 0, to.data(), from.data(), from.size());
    return std::chrono::steady_clock::now() - start;
  };
  // In turn, so that what else runs is in the way of both.
  auto own = std::chrono::steady_clock::duration::max(), portable = own;
  for (int round = 0; round < 10; ++round) {
    own = std::min(own, time(GetParam()));
    portable = std::min(portable, time("portable"));
  }
  EXPECT_LE(own, 3 * portable / 2);
}

INSTANTIATE_TEST_SUITE_P(All, Crc32cBySuite,
                         ::testing::Values("sse4.2", "vpclmulqdq", "armv8-crc",
                                           "portable"),
                         [](const auto& name) {
                           std::string text = name.param;
                           std::erase_if(text, [](char c) {
                             return c == '.' || c == '-';
                           });
                           return text;
                         });

TEST(StreamCopy, EverySizeAndAlignment) {
  const auto from = CrcInput(300'000, 7);
  // On both sides of the size from which on stores are streamed.
  for (const size_t size : {0, 1, 63, 4096, 8191, 8192, 8255, 65537, 200'003}) {
    for (const size_t source : {0, 1, 8, 63}) {
      for (const size_t target : {0, 1, 8, 63}) {
        std::vector<unsigned char> to(size + 200, '!'), expected = to;
        std::copy_n(from.data() + source, size, expected.data() + target);
        StreamCopy(to.data() + target, from.data() + source, size);
        ASSERT_TRUE(to == expected) << size << " " << source << " " << target;
      }
    }
  }
  StreamCopy(nullptr, nullptr, 0);
}

TEST(Crc32c, GoesOnWhereItStopped) {
  const auto data = CrcInput(20000, 4);
  const uint32_t whole = Crc32c(0, data.data(), data.size());
  for (size_t cut = 0; cut <= data.size(); cut += 997) {
    const uint32_t first = Crc32c(0, data.data(), cut);
    EXPECT_EQ(Crc32c(first, data.data() + cut, data.size() - cut), whole);
    const uint32_t second = Crc32c(0, data.data() + cut, data.size() - cut);
    EXPECT_EQ(Crc32cCombine(first, second, data.size() - cut), whole);
  }
}

TEST(Crc32c, CombinesOverHugeLengths) {
  // A zero block's digest over n + m zero bytes, built in two ways.
  const std::string zeros(1 << 16, '\0');
  uint32_t crc = Crc32c(0, zeros.data(), zeros.size());
  uint64_t bytes = zeros.size();
  std::vector<uint32_t> doubled{crc};
  for (int i = 0; i < 44; ++i) {  // up to 2^60 bytes
    crc = Crc32cCombine(crc, crc, bytes);
    bytes *= 2;
    doubled.push_back(crc);
  }
  const uint32_t left = Crc32cCombine(
      doubled[40], Crc32cCombine(doubled[30], doubled[3], uint64_t{1} << 19),
      (uint64_t{1} << 46) + (uint64_t{1} << 19));
  const uint32_t right =
      Crc32cCombine(Crc32cCombine(doubled[40], doubled[30], uint64_t{1} << 46),
                    doubled[3], uint64_t{1} << 19);
  EXPECT_EQ(left, right);
  EXPECT_EQ(doubled[2], Crc32c(0, std::string(1 << 18, '\0').data(), 1 << 18));
}

// The other tests pass on the table as well, at a tenth of the speed.
TEST(Crc32c, UsesTheInstructionWhereThereIsOne) {
#if defined(__x86_64__)
  const bool has_one = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
  const bool has_one = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  const bool has_one = false;
#endif
  const std::string name = Crc32cImplementation();
  EXPECT_EQ(name != "portable", has_one) << name;
}

}  // namespace
}  // namespace torch_ckpt
