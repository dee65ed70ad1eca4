#include <gtest/gtest.h>

#include <string>

#include "base/siphash.h"

namespace torch_ckpt {
namespace {

// The vectors of SipHash-1-3 with the key 00 01 .. 0f, for the texts of no
// byte, 00, and 00 01 .. (n - 1).
TEST(SipHash, KnownValues) {
  const std::array<uint64_t, 2> key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
  std::string text;
  EXPECT_EQ(SipHash(key, text), 0xabac0158050fc4dcu);
  text += '\0';
  EXPECT_EQ(SipHash(key, text), 0xc9f49bf37d57ca93u);
}

TEST(SipHash, EveryBitOfTextAndKeyCounts) {
  const std::array<uint64_t, 2> key = {1, 2};
  for (size_t size : {0u, 1u, 7u, 8u, 9u, 40u}) {
    const std::string text(size, 'x');
    const uint64_t hash = SipHash(key, text);
    EXPECT_NE(hash, SipHash(key, text + '\0'));
    EXPECT_NE(hash, SipHash({1, 3}, text));
    EXPECT_NE(hash, SipHash({0, 2}, text));
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      std::string other = text;
      other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
      EXPECT_NE(hash, SipHash(key, other));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
