// Any bytes of tensors that are made of others, as outputs ask for them.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/write/converted_tensors.h"
#include "engine/write/fill.h"
#include "engine_test_util.h"

namespace torch_ckpt {
namespace {

// Row r of one is column r of the other.
std::string Turned(const Array& array) {
  const auto unit = static_cast<size_t>(DtypeBits(array.dtype) / 8);
  const auto rows = static_cast<size_t>(array.shape[0]);
  const auto columns = static_cast<size_t>(array.shape[1]);
  std::string out(array.bytes.size(), '\0');
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      std::copy_n(array.bytes.data() + (r * columns + c) * unit, unit,
                  out.data() + (c * rows + r) * unit);
    }
  }
  return out;
}

class MadeTensorsTest : public EngineDiskTest,
                        public testing::WithParamInterface<Dtype> {};

TEST_P(MadeTensorsTest, StretchesThatCutElements) {
  const Array array = MakeArray(GetParam(), {7, 10}, 3);
  ASSERT_OK(SaveAll(Path("in"), GridPieces("w", array, {2, 2})).status());
  const auto opened = OpenCheckpoint(Path("in"));
  ASSERT_OK(opened.status());
  const auto mapped = Checkpoint::MapOntoNew(*opened, {{"w", "t.T"}}, {});
  ASSERT_OK(mapped.status());
  const Catalog& catalog = mapped->checkpoint->catalog();
  ASSERT_EQ(catalog.entries().size(), 1u);
  EXPECT_EQ(catalog.entries()[0].shape, (Dims{10, 7}));
  StoredInputs inputs(mapped->checkpoint->LendFiles(false), true, 1);
  ConvertedTensors tensors(mapped->checkpoint, &inputs);
  const Origin origin = tensors.Find(0, GetParam());
  const std::string wanted = Turned(array);
  std::vector<std::byte> scratch(origin.provider->ScratchBytes());
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const uint64_t from = random() % wanted.size();
    const uint64_t bytes = 1 + random() % (wanted.size() - from);
    // Two stretches, with room between them that is nobody's.
    const uint64_t first = random() % (bytes + 1);
    std::vector<std::byte> out(bytes + 3, std::byte{0xAA});
    FillBuffer buffer(out, 0, 0, FillBuffer::Copies::kCached);
    std::vector<Stretch> stretches;
    if (first > 0) stretches.push_back({origin.index, from, first, 0});
    if (first < bytes) {
      stretches.push_back(
          {origin.index, from + first, bytes - first, first + 3});
    }
    ASSERT_OK(FillStretches({{origin.provider, stretches}}, scratch, &buffer));
    EXPECT_EQ(buffer.filled(), bytes);
    const auto* const text = reinterpret_cast<const char*>(out.data());
    EXPECT_EQ(std::string(text, first), wanted.substr(from, first));
    EXPECT_EQ(std::string(text + first, 3), "\xAA\xAA\xAA");
    EXPECT_EQ(std::string(text + first + 3, bytes - first),
              wanted.substr(from + first, bytes - first));
  }
  EXPECT_OK(tensors.Check());
}

INSTANTIATE_TEST_SUITE_P(Widths, MadeTensorsTest,
                         testing::Values(Dtype::kU8, Dtype::kBF16, Dtype::kF32,
                                         Dtype::kC64, Dtype::kF64));

class MapOntoNewTest : public EngineDiskTest {};

TEST_F(MapOntoNewTest, TheSideOfTheCheckpointIsFoundByItsNames) {
  const Array array = MakeArray(Dtype::kF32, {4, 6}, 3);
  ASSERT_OK(SaveAll(Path("in"), {WholePiece("w", array)}).status());
  const auto opened = OpenCheckpoint(Path("in"));
  ASSERT_OK(opened.status());
  const std::vector<std::vector<MappingPair>> both = {{{"w[{n}]", "r.{n}"}},
                                                      {{"r.{n}", "w[{n}]"}}};
  for (const auto& pairs : both) {
    const auto mapped = Checkpoint::MapOntoNew(*opened, pairs, {});
    ASSERT_OK(mapped.status());
    EXPECT_EQ(mapped->checkpoint->catalog().entries().size(), 4u);
    EXPECT_GE(mapped->checkpoint->catalog().Find("r.3"), 0);
  }
  // Of both sides it is the first.
  const auto same =
      Checkpoint::MapOntoNew(*opened, {{"w[: 2]", "w"}, {"w[2 :]", "0"}}, {});
  ASSERT_OK(same.status());
  EXPECT_EQ(same->checkpoint->catalog().entries()[0].shape, (Dims{2, 6}));
  const auto none = Checkpoint::MapOntoNew(*opened, {{"v", "x"}}, {});
  ASSERT_OK(none.status());
  EXPECT_EQ(none->unmatched, std::vector<size_t>{0});
}

}  // namespace
}  // namespace torch_ckpt
