#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/layout.h"

namespace torch_ckpt {
namespace {

SafetensorsEntry Entry(std::string name, Dtype dtype, Dims shape) {
  SafetensorsEntry entry;
  entry.name = std::move(name);
  entry.dtype = dtype;
  entry.shape = shape;
  entry.begin = 77;  // ignored
  entry.end = 78;
  return entry;
}

TEST(LayOutFile, OrdersByClassAndTiles) {
  std::vector<SafetensorsEntry> tensors = {
      Entry("z.bf16", Dtype::kBF16, {3}),
      Entry("b.page", Dtype::kU8, {2, 4096}),
      Entry("empty", Dtype::kI64, {0, 5}),
      Entry("a.bf16", Dtype::kBF16, {5}),
      Entry("scalar", Dtype::kI64, {}),
      Entry("a.page", Dtype::kF32, {1024}),
      Entry("f4", Dtype::kF4, {6}),
      Entry("f6", Dtype::kF6E2M3, {4}),
      Entry("f32", Dtype::kF32, {1023}),
  };
  const std::vector<uint32_t> order = LayOutFile(&tensors);
  EXPECT_EQ(order, (std::vector<uint32_t>{5, 1, 4, 8, 3, 0, 7, 6, 2}));
  std::vector<std::string> names;
  uint64_t at = 0;
  for (const SafetensorsEntry& entry : tensors) {
    names.push_back(entry.name);
    EXPECT_EQ(entry.begin, at) << entry.name;
    at = entry.end;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"a.page", "b.page", "scalar",
                                             "f32", "a.bf16", "z.bf16", "f6",
                                             "f4", "empty"}));
  EXPECT_EQ(tensors[1].end, 12288u);
  EXPECT_EQ(tensors[2].end, 12296u);
  EXPECT_EQ(tensors[6].end - tensors[6].begin, 3u);
  EXPECT_EQ(tensors[7].end - tensors[7].begin, 3u);
  EXPECT_EQ(tensors[8].begin, tensors[8].end);
}

TEST(LayOutFile, NothingToLayOut) {
  std::vector<SafetensorsEntry> none;
  EXPECT_TRUE(LayOutFile(&none).empty());
}

}  // namespace
}  // namespace torch_ckpt
