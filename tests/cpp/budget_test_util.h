// For tests of what bytes may cost. Steps are counted, which comes out the same
// on every machine; what no step counts shows in processor time, of which two
// runs are compared.
#pragma once

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "base/budget.h"
#include "sanitizers.h"

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

// The least that `read` took of several times, in seconds of the processor.
template <class Read>
double LeastCpuSeconds(const Read& read) {
  double least = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double begin = CpuSeconds();
    read();
    least = std::min(least, CpuSeconds() - begin);
  }
  return least;
}

// See ExpectLinear. Files grow until one takes long enough to be measured, or
// is large or refused. Four times the file takes sixteen times as long where
// that is quadratic: between that and four lies what a busy machine adds, of
// which the best of several tries has the least, and what memory costs that is
// in no cache any more, twice as much and a bit.
template <class Read>
void ExpectLinearTime(const Read& read, size_t n) {
  if (kSanitized) return;
  constexpr double kMeasurable = 0.02;
  constexpr size_t kLarge = size_t{8} << 20;
  constexpr int kTries = 5;
  bool refused = false;
  const auto least = [&](size_t size) {
    return LeastCpuSeconds([&] {
      if (refused) return;
      const Cost cost = read(size);
      refused = !cost.status.ok() || cost.bytes > kLarge;
    });
  };
  double once = 0, many = 0;
  while (!refused && (once = least(n)) < kMeasurable) n *= 2;
  for (int i = 0; i < kTries && !refused; ++i) {
    many = least(4 * n);
    if (refused || many <= 11 * once) return;
    once = least(n);
  }
  if (!refused)
    ADD_FAILURE() << once << " s of " << n << ", " << many
                  << " s of four times as many";
}

// read(n) -> Cost of a file that grows with n. Twice the file takes at most 2.5
// times the steps, or is refused; and so of the time, but for what the machine
// does to it.
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
