#include <gtest/gtest.h>

#include <random>
#include <string>

#include "runtime/stream_copy.h"

namespace torch_ckpt {
namespace {

TEST(StreamCopy, EverySizeAndAlignment) {
  std::mt19937 random(7);
  std::string from(300'000, '\0');
  for (char& c : from) c = static_cast<char>(random());
  // On both sides of the size from which on stores are streamed.
  for (const size_t size : {0, 1, 63, 4096, 65535, 65536, 65537, 200'003}) {
    for (const size_t source : {0, 1, 8, 63}) {
      for (const size_t target : {0, 1, 8, 63}) {
        std::string to(size + 200, '!');
        StreamCopy(reinterpret_cast<std::byte*>(to.data()) + target,
                   AsBytes(from).subspan(source, size));
        EXPECT_EQ(to.substr(target, size), from.substr(source, size));
        EXPECT_EQ(to.substr(0, target), std::string(target, '!'));
        EXPECT_EQ(to.substr(target + size),
                  std::string(to.size() - target - size, '!'));
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
