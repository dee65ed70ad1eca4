#include <gtest/gtest.h>

#include <string>

#include "runtime/crc32.h"

namespace torch_ckpt {
namespace {

TEST(Crc32Test, KnownValues) {
  EXPECT_EQ(Crc32(0, "", 0), 0u);
  EXPECT_EQ(Crc32(0, "123456789", 9), 0xcbf43926u);
  const std::string zeros(32, '\0');
  EXPECT_EQ(Crc32(0, zeros.data(), zeros.size()), 0x190a55adu);
}

TEST(Crc32Test, AnyCutGivesTheSame) {
  std::string bytes;
  for (int i = 0; i < 300; ++i) bytes += static_cast<char>(i * 37 + i / 7);
  const uint32_t whole = Crc32(0, bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t first = Crc32(0, bytes.data(), cut);
    EXPECT_EQ(Crc32(first, bytes.data() + cut, bytes.size() - cut), whole);
  }
}

}  // namespace
}  // namespace torch_ckpt
