#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "plan/byte_box.h"

namespace torch_ckpt {
namespace {

// Every byte of the tensor, and for those in the box their place in it.
std::vector<int64_t> PlacesOf(const Dims& shape, const Box& box,
                              int64_t element) {
  std::vector<int64_t> places;
  int64_t next = 0;
  for (int64_t i = 0; i < shape.Product(); ++i) {
    int64_t rest = i;
    bool inside = true;
    for (int d = shape.size() - 1; d >= 0; --d) {
      const int64_t at = rest % shape[d];
      rest /= shape[d];
      inside =
          inside && at >= box.offsets[d] && at < box.offsets[d] + box.sizes[d];
    }
    for (int64_t b = 0; b < element; ++b) {
      places.push_back(inside ? next++ : -1);
    }
  }
  return places;
}

TEST(ByteBox, AgreesWithElements) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 2000; ++round) {
    Dims shape;
    Box box;
    const int64_t rank = below(5);
    for (int64_t d = 0; d < rank; ++d) {
      const int64_t extent = 1 + below(5);
      const int64_t offset = below(extent);
      shape.push_back(extent);
      box.offsets.push_back(offset);
      box.sizes.push_back(below(extent - offset + 1));
    }
    const Dtype dtype = random() % 2 == 0 ? Dtype::kU8 : Dtype::kF32;
    const auto made = ByteBox::Make(dtype, shape, box);
    ASSERT_TRUE(made.ok());
    const std::vector<int64_t> places =
        PlacesOf(shape, box, DtypeBits(dtype) / 8);
    uint64_t before = 0;
    std::vector<std::byte> source;
    for (size_t at = 0; at < places.size(); ++at) {
      ASSERT_EQ(made->Before(at), before) << shape.ToString() << box.ToString();
      if (places[at] < 0) continue;
      ++before;
      source.push_back(static_cast<std::byte>(1 + at % 251));
    }
    ASSERT_EQ(made->Before(places.size()), before);
    ASSERT_EQ(made->size(), before);
    // Any stretch of the tensor is one of the box.
    const auto begin = static_cast<uint64_t>(below(int64_t(places.size()) + 1));
    const uint64_t end = begin + static_cast<uint64_t>(
                                     below(int64_t(places.size() - begin) + 1));
    std::vector<std::byte> out(end - begin);
    const uint64_t from = made->Before(begin);
    made->Scatter(from, made->Before(end) - from, source.data() + from,
                  out.data(), begin);
    for (uint64_t at = begin; at < end; ++at) {
      ASSERT_EQ(out[at - begin], places[at] < 0
                                     ? std::byte{0}
                                     : static_cast<std::byte>(1 + at % 251));
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
