#include <gtest/gtest.h>

#include "plan/divide.h"

namespace torch_ckpt {
namespace {

const std::vector<std::string_view> kNames = {"a", "b", "c", "d"};

std::vector<int64_t> BySize(const std::vector<uint64_t>& bytes,
                            uint64_t max_bytes) {
  FileRule rule;
  rule.max_bytes = max_bytes;
  std::vector<std::string_view> names(bytes.size(), "t");
  const auto division = DivideIntoFiles(names, bytes, rule);
  EXPECT_TRUE(division.ok());
  EXPECT_EQ(division->count, bytes.empty() ? 1 : division->index.back());
  return division->index;
}

TEST(DivideIntoFiles, WithoutARuleThereIsOneFile) {
  EXPECT_EQ(BySize({1, 2, 3}, 0), (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(BySize({}, 0), (std::vector<int64_t>{}));
}

TEST(DivideIntoFiles, AFileTakesWhatFitsInOrder) {
  EXPECT_EQ(BySize({4, 6, 1, 9, 1}, 10), (std::vector<int64_t>{1, 1, 2, 2, 3}));
  EXPECT_EQ(BySize({10, 10}, 10), (std::vector<int64_t>{1, 2}));
  // One that is larger than a file has one to itself.
  EXPECT_EQ(BySize({1, 50, 1}, 10), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(BySize({50, 1}, 10), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(BySize({UINT64_MAX, UINT64_MAX}, 10), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(BySize({0, 0, 0}, 1), (std::vector<int64_t>{1, 1, 1}));
}

TEST(DivideIntoFiles, AMappingSaysTheFileAndTheCount) {
  FileRule rule;
  rule.mapping = {{{"a", 2}, {"c", 7}, {"other", 9}}};
  const auto division =
      DivideIntoFiles(kNames, std::vector<uint64_t>(kNames.size(), 1), rule);
  ASSERT_TRUE(division.ok());
  EXPECT_EQ(division->index, (std::vector<int64_t>{2, 0, 7, 0}));
  EXPECT_EQ(division->count, 9);
  for (const int64_t index : {int64_t{0}, int64_t{-1}, kMaxFileIndex + 1}) {
    rule.mapping = {{{"a", index}}};
    const auto refused =
        DivideIntoFiles(kNames, std::vector<uint64_t>(kNames.size(), 1), rule);
    EXPECT_EQ(refused.status().kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(refused.status().tensor(), "a");
  }
}

TEST(DivideIntoFiles, MoreFilesThanHaveNamesAreRefused) {
  const std::vector<std::string_view> names(kMaxFileIndex + 1, "t");
  const std::vector<uint64_t> bytes(names.size(), 2);
  FileRule rule;
  rule.max_bytes = 1;
  EXPECT_EQ(DivideIntoFiles(names, bytes, rule).status().kind(),
            ErrorKind::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt
