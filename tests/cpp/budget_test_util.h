// For tests of what bytes may cost: steps are counted, and time is not, so that
// they come out the same on every machine.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "base/budget.h"

namespace torch_ckpt {

struct Cost {
  Status status;
  uint64_t steps = 0;
  size_t bytes = 0;  // of the file
};

// read(n) -> Cost of a file that grows with n. Twice the file takes at most 2.5
// times the steps, or is refused.
template <class Read>
void ExpectLinear(const Read& read, size_t n) {
  const Cost once = read(n), twice = read(2 * n);
  ASSERT_GT(twice.bytes, once.bytes);
  ASSERT_LT(twice.bytes, 3 * once.bytes);
  // No file costs more than belongs to its bytes.
  for (const Cost& each : {once, twice}) {
    EXPECT_LE(each.steps,
              Budget::kStepsAnyway + Budget::kStepsPerByte * each.bytes);
  }
  if (!twice.status.ok()) {
    EXPECT_EQ(twice.status.kind(), ErrorKind::kExhausted)
        << twice.status.ToString();
    return;
  }
  EXPECT_GT(twice.steps, once.steps);
  EXPECT_LE(static_cast<double>(twice.steps),
            2.5 * static_cast<double>(once.steps));
}

}  // namespace torch_ckpt
