#include <gtest/gtest.h>

#include <set>
#include <string>

#include "format/dtype.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kHuge = (int64_t{1} << 48) - 1;

TEST(FormatDtype, NamesAndBits) {
  std::set<std::string> names;
  for (int i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    names.insert(DtypeName(dtype));
    EXPECT_EQ(DtypeFromName(DtypeName(dtype)), dtype);
    const Unit unit = DtypeUnit(dtype);
    EXPECT_EQ(unit.elements * DtypeBits(dtype), unit.bytes * 8);
  }
  EXPECT_EQ(names.size(), 22u);
  EXPECT_STREQ(DtypeName(Dtype::kF8E4M3), "F8_E4M3");
  EXPECT_STREQ(DtypeName(Dtype::kU64), "U64");
  EXPECT_EQ(DtypeBits(Dtype::kF4), 4);
  EXPECT_EQ(DtypeBits(Dtype::kF6E3M2), 6);
  EXPECT_EQ(DtypeBits(Dtype::kC64), 64);
  EXPECT_EQ(DtypeBits(Dtype::kBF16), 16);
  EXPECT_EQ(DtypeFromName("f32"), std::nullopt);
  EXPECT_EQ(DtypeFromName(""), std::nullopt);
}

TEST(FormatDtype, ByteSize) {
  EXPECT_EQ(*ByteSize(Dtype::kF32, {}), 4u);
  EXPECT_EQ(*ByteSize(Dtype::kF32, {3, 5}), 60u);
  EXPECT_EQ(*ByteSize(Dtype::kF32, {3, 0, 5}), 0u);
  EXPECT_EQ(*ByteSize(Dtype::kF4, {3, 2}), 3u);
  EXPECT_EQ(*ByteSize(Dtype::kF6E2M3, {4}), 3u);
  EXPECT_EQ(*ByteSize(Dtype::kU8, {kHuge}), static_cast<uint64_t>(kHuge));
  EXPECT_FALSE(ByteSize(Dtype::kF4, {3}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kF4, {}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kF6E2M3, {2}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kU8, {-1}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kU8, {kHuge, kHuge}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kF64, {kHuge, 1 << 14}).ok());
  // The order of the dimensions does not matter.
  EXPECT_FALSE(ByteSize(Dtype::kU8, {0, kHuge, kHuge}).ok());
  EXPECT_FALSE(ByteSize(Dtype::kU8, {kHuge, kHuge, 0}).ok());
}

TEST(FormatDtype, InUnitsOfWholeBytesChangesNothing) {
  const Box box{{1, 2}, {2, 3}};
  const auto view = InUnits(Dtype::kBF16, {4, 7}, box);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->shape, (Dims{4, 7}));
  EXPECT_EQ(view->box, box);
  EXPECT_EQ(view->unit_bytes, 2);
  const auto scalar = InUnits(Dtype::kF64, {}, Box{});
  ASSERT_TRUE(scalar.ok());
  EXPECT_EQ(scalar->box.Volume(), 1);
}

TEST(FormatDtype, InUnitsDividesTheLastDimension) {
  const auto f4 = InUnits(Dtype::kF4, {3, 8}, {{1, 2}, {2, 4}});
  ASSERT_TRUE(f4.ok()) << f4.status().ToString();
  EXPECT_EQ(f4->shape, (Dims{3, 4}));
  EXPECT_EQ(f4->box, (Box{{1, 1}, {2, 2}}));
  EXPECT_EQ(f4->unit_bytes, 1);
  const auto f6 = InUnits(Dtype::kF6E3M2, {2, 8}, {{0, 4}, {2, 4}});
  ASSERT_TRUE(f6.ok()) << f6.status().ToString();
  EXPECT_EQ(f6->shape, (Dims{2, 2}));
  EXPECT_EQ(f6->box, (Box{{0, 1}, {2, 1}}));
  EXPECT_EQ(f6->unit_bytes, 3);
}

TEST(FormatDtype, InUnitsOfAnOddRowIsFlatOrNothing) {
  const Dims odd = {2, 3};
  const auto whole = InUnits(Dtype::kF4, odd, Box::Whole(odd));
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  EXPECT_EQ(whole->shape, (Dims{3}));
  EXPECT_EQ(whole->box, (Box{{0}, {3}}));
  const auto part = InUnits(Dtype::kF4, odd, {{0, 0}, {1, 3}});
  EXPECT_EQ(part.status().kind(), ErrorKind::kUnsupported);
  const auto f6 = InUnits(Dtype::kF6E2M3, {2, 2, 3}, Box::Whole({2, 2, 3}));
  ASSERT_TRUE(f6.ok());
  EXPECT_EQ(f6->shape, (Dims{3}));
  EXPECT_EQ(f6->unit_bytes, 3);
}

TEST(FormatDtype, InUnitsRefuses) {
  const auto kind = [](Dtype dtype, const Dims& shape, const Box& box) {
    return InUnits(dtype, shape, box).status().kind();
  };
  EXPECT_EQ(kind(Dtype::kF4, {4}, {{1}, {2}}), ErrorKind::kUnsupported);
  EXPECT_EQ(kind(Dtype::kF4, {4}, {{0}, {3}}), ErrorKind::kUnsupported);
  EXPECT_EQ(kind(Dtype::kF6E2M3, {8}, {{2}, {4}}), ErrorKind::kUnsupported);
  EXPECT_EQ(kind(Dtype::kF4, {}, Box{}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(Dtype::kF4, {3}, {{0}, {2}}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(Dtype::kU8, {4}, {{3}, {2}}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(Dtype::kU8, {4, 4}, {{0}, {2}}), ErrorKind::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt
