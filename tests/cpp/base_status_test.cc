#include <gtest/gtest.h>

#include <string>

#include "base/status.h"

namespace torch_ckpt {
namespace {

TEST(Result, IsAValueOrAnError) {
  const Result<std::string> value("a");
  EXPECT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  EXPECT_EQ(*value, "a");
  const Result<std::string> error(Corrupt("b"));
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().kind(), ErrorKind::kCorrupt);
}

// Or TC_RETURN_IF_ERROR(result.status()) would go on without a value.
TEST(Result, AnOkStatusIsNoValueAndAnError) {
  const Result<int> result((Status()));
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.status().kind(), ErrorKind::kInternal);
}

}  // namespace
}  // namespace torch_ckpt
