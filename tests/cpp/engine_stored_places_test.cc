// Which element a byte of a file is, of tensors in boxes.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "engine/open/stored_view.h"
#include "engine/read/stored_places.h"

namespace torch_ckpt {
namespace {

Placement At(uint32_t file, uint64_t offset, Box box) {
  Placement placement;
  placement.file = file;
  placement.offset = offset;
  placement.box = std::move(box);
  return placement;
}

Result<StoredPlaces> PlacesOf(Dtype dtype, const Dims& shape,
                              const std::vector<Placement>& placements) {
  CatalogEntry entry;
  entry.dtype = dtype;
  entry.shape = shape;
  const auto view = StoredView::Make(entry, placements);
  if (!view.ok()) return view.status();
  return StoredPlaces::Of(**view);
}

TEST(StoredPlaces, EveryByteOfBoxesThatCutRows) {
  // Two in one file, the later one first, and one in another.
  const std::vector<Placement> placements = {
      At(0, 100, {{0, 0}, {3, 2}}),
      At(0, 10, {{0, 2}, {3, 5}}),
      At(1, 7, {{3, 0}, {2, 7}}),
  };
  const auto places = PlacesOf(Dtype::kF8E4M3, {5, 7}, placements);
  ASSERT_TRUE(places.ok());
  for (const Placement& placement : placements) {
    const Box& box = placement.box;
    uint64_t offset = placement.offset;
    for (int64_t row = 0; row < box.sizes[0]; ++row) {
      for (int64_t column = 0; column < box.sizes[1]; ++column, ++offset) {
        const auto place = places->Find(placement.file, offset);
        EXPECT_EQ(place.first,
                  static_cast<uint64_t>((box.offsets[0] + row) * 7 +
                                        box.offsets[1] + column));
        // To the end of the row of the box, or of a box of whole rows.
        const int64_t left = box.sizes[1] == 7
                                 ? (box.sizes[0] - row) * 7 - column
                                 : box.sizes[1] - column;
        EXPECT_EQ(place.units, static_cast<uint64_t>(left));
      }
    }
  }
}

TEST(StoredPlaces, TwoCodesInAByteAreOneUnit) {
  const auto places =
      PlacesOf(Dtype::kF4, {2, 8}, {At(0, 5, {{0, 0}, {2, 8}})});
  ASSERT_TRUE(places.ok());
  EXPECT_EQ(places->Find(0, 5).units, 8U);
  EXPECT_EQ(places->Find(0, 10).first, 5U);
}

TEST(StoredPlaces, BoxesInTheSameBytesAreRefused) {
  const Box low{{0, 0}, {2, 4}}, high{{2, 0}, {2, 4}};
  for (const uint64_t second : {uint64_t{0}, uint64_t{7}}) {
    const auto places =
        PlacesOf(Dtype::kF8E4M3, {4, 4}, {At(0, 0, low), At(0, second, high)});
    ASSERT_FALSE(places.ok());
    EXPECT_EQ(places.status().kind(), ErrorKind::kCorrupt);
  }
  EXPECT_TRUE(
      PlacesOf(Dtype::kF8E4M3, {4, 4}, {At(0, 0, low), At(0, 8, high)}).ok());
  EXPECT_TRUE(
      PlacesOf(Dtype::kF8E4M3, {4, 4}, {At(0, 0, low), At(1, 0, high)}).ok());
}

TEST(StoredPlaces, WhatIsNotStoredRowByRow) {
  Placement turned = At(0, 0, Box::Whole({4, 4}));
  turned.kind = PlacementKind::kStridedBox;
  turned.strides = {1, 4};
  const auto places = PlacesOf(Dtype::kF8E4M3, {4, 4}, {turned});
  ASSERT_FALSE(places.ok());
  EXPECT_EQ(places.status().kind(), ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace torch_ckpt
