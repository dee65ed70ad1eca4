#include <gtest/gtest.h>

#include "base/budget.h"

namespace torch_ckpt {
namespace {

TEST(BudgetTest, CountsStepsAndEndsWhereTheyAreSpent) {
  Budget budget("the file", 10);
  EXPECT_TRUE(budget.Step());
  EXPECT_TRUE(budget.Touch(640));
  EXPECT_EQ(budget.steps(), 12u);
  const uint64_t all = Budget::kStepsAnyway + 10 * Budget::kStepsPerByte;
  EXPECT_TRUE(budget.Step(all - 12));
  EXPECT_FALSE(budget.Step());
  EXPECT_EQ(budget.steps(), all);
  EXPECT_FALSE(budget.Keep(0));
  EXPECT_EQ(budget.Over().kind(), ErrorKind::kExhausted);
  EXPECT_NE(budget.Over().message().find("the file of 10 bytes takes more"),
            std::string::npos);
}

TEST(BudgetTest, NumbersOfAnySizeEndIt) {
  Budget steps("the file", 0);
  EXPECT_TRUE(steps.Step());
  EXPECT_FALSE(steps.Step(UINT64_MAX));
  EXPECT_FALSE(steps.Step(0));
  Budget kept("the file", 0);
  EXPECT_FALSE(kept.Keep(UINT64_MAX));
  EXPECT_NE(kept.Over().message().find("says more than fits into 16 MiB"),
            std::string::npos);
}

TEST(BudgetTest, KeepsSixteenTimesTheBytesAndAGibibyteAtTheMost) {
  constexpr uint64_t kMib = uint64_t{1} << 20;
  EXPECT_EQ(Budget::MostKept(0), 16 * kMib);
  EXPECT_EQ(Budget::MostKept(10 * kMib), 176 * kMib);
  EXPECT_EQ(Budget::MostKept(100 * kMib), 1024 * kMib);
  // Of which nothing smaller could be made.
  EXPECT_EQ(Budget::MostKept(1024 * kMib), 4096 * kMib);
  Budget budget("the file", 0);
  EXPECT_TRUE(budget.Keep(10 * kMib));
  EXPECT_EQ(budget.kept_left(), 6 * kMib);
  EXPECT_FALSE(budget.Keep(7 * kMib));
  // Of what does not come of its bytes alone.
  EXPECT_EQ(Budget("the file", kMib, 40 * kMib).kept_left(), 56 * kMib);
}

}  // namespace
}  // namespace torch_ckpt
