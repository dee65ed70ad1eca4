// For tests of what bytes may cost. Steps are counted, which comes out the same
// on every machine; what no step counts shows in processor time, of which two
// runs are compared.
#pragma once

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "base/budget.h"

namespace torch_ckpt {

struct Cost {
  Status status;
  uint64_t steps = 0;
  size_t bytes = 0;  // of the file
};

inline double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         static_cast<double>(now.tv_nsec) * 1e-9;
}

// See ExpectLinear. Files grow until one takes long enough to be measured, or
// is large or refused.
template <class Read>
void ExpectLinearTime(const Read& read, size_t n) {
  constexpr double kMeasurable = 0.04;
  constexpr size_t kLarge = size_t{4} << 20;
  bool refused = false;
  const auto best = [&](size_t size) {
    double least = 1e9;
    for (int i = 0; i < 3 && !refused; ++i) {
      const double begin = CpuSeconds();
      const Cost cost = read(size);
      least = std::min(least, CpuSeconds() - begin);
      refused = !cost.status.ok() || cost.bytes > kLarge;
    }
    return least;
  };
  for (double once = best(n); !refused; n *= 2) {
    const double twice = best(2 * n);
    if (once >= kMeasurable) {
      EXPECT_LE(twice, 3.2 * once) << "of " << n << " and " << 2 * n;
      return;
    }
    once = twice;
  }
}

// read(n) -> Cost of a file that grows with n. Twice the file takes at most 2.5
// times the steps, or is refused; and so of the time, but for what the machine
// does to it: what is quadratic takes four times as much.
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
  ExpectLinearTime(read, n);
}

}  // namespace torch_ckpt
