#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/copy_run.h"

namespace torch_ckpt {
namespace {

TEST(CopyRun, TransposesOfEveryElementSize) {
  for (const size_t unit : {1u, 2u, 3u, 4u, 8u, 16u}) {
    SCOPED_TRACE(unit);
    const size_t rows = 150, cols = 131;  // whole blocks and remainders
    const int64_t step = static_cast<int64_t>(unit);
    std::vector<std::byte> from(rows * cols * unit), to(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
      from[i] = static_cast<std::byte>(i * 31 + i / 251);
    }
    const Box box = Box::Whole({150, 131});
    torch_ckpt::Run run;
    ASSERT_TRUE(MakeRun({box, 0, {131 * step, step}},
                        {box, 0, {step, 150 * step}}, step, &run));
    CopyRun(run, from.data(), 0, to.data(), 0);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < cols; ++c) {
        ASSERT_TRUE(std::equal(from.data() + (r * cols + c) * unit,
                               from.data() + (r * cols + c + 1) * unit,
                               to.data() + (c * rows + r) * unit))
            << r << ", " << c;
      }
    }
  }
}

TEST(CopyRun, EveryShortLength) {
  for (uint64_t bytes = 1; bytes <= 200; ++bytes) {
    std::vector<std::byte> from(3 * 257), to(3 * 211), expected;
    for (size_t i = 0; i < from.size(); ++i) {
      from[i] = static_cast<std::byte>(i * 7 + 1);
    }
    expected = to;
    for (size_t r = 0; r < 3; ++r) {
      std::copy_n(from.data() + r * 257, bytes, expected.data() + r * 211);
    }
    torch_ckpt::Run run;
    run.bytes = bytes;
    run.loops = 1;
    run.count[0] = 3;
    run.src_stride[0] = 257;
    run.dst_stride[0] = 211;
    CopyRun(run, from.data(), 0, to.data(), 0);
    EXPECT_EQ(to, expected) << bytes;
  }
}

}  // namespace
}  // namespace torch_ckpt
