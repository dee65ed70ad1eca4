// Tensors of which a rank has several boxes: one entry of its file each.
#include <algorithm>
#include <deque>
#include <random>

#include "engine/open/build_catalog.h"
#include "engine/save/write_job.h"
#include "engine_test_util.h"
#include "memory_boxes.h"

namespace torch_ckpt {
namespace {

class DataLayoutTest : public EngineDiskTest {
 protected:
  void SetUp() override {
    EngineDiskTest::SetUp();
    ASSERT_OK(Directory::Create(Path("stage")));
    plan_.staging = Path("stage");
    plan_.files.push_back({"model.safetensors", FileRole::kData, {}, {}});
  }

  void Add(const std::string& name, const Array& array, const Box& box,
           bool dense = true) {
    plan_.files[0].tensors.push_back({name, array.dtype, box.sizes, box.offsets,
                                      array.shape, memory_.sources.size()});
    memory_.Add(array, box, dense);
  }

  Status Write() {
    Job job;
    TC_ASSIGN_OR_RETURN(WrittenPlan written,
                        RunWriteJob(plan_, memory_.sources, &job));
    file_ = written.files[0];
    text_ = ReadText(Path("stage/" + file_.staged));
    TC_ASSIGN_OR_RETURN(const Directory stage, Directory::Open(Path("stage")));
    TC_ASSIGN_OR_RETURN(const File opened, stage.OpenFile(file_.staged, {}));
    TC_ASSIGN_OR_RETURN(const FileInfo info, opened.Stat());
    TC_ASSIGN_OR_RETURN(header_, ReadFileHeader(opened, info));
    // What the commit goes by.
    TC_ASSIGN_OR_RETURN(
        const ShortHeader short_header,
        DecodeShortHeader(AsBytes(EncodeShortHeader(header_, 0))));
    TC_ASSIGN_OR_RETURN(CatalogBuilder by_short,
                        BuildCatalog({{file_.name, short_header.file, 0}},
                                     BoxProof::kDisjoint));
    TC_ASSIGN_OR_RETURN(
        CatalogBuilder by_text,
        BuildCatalog({{file_.name, header_, 0}}, BoxProof::kDisjoint));
    EXPECT_TRUE(by_short.Encode().value() == by_text.Encode().value());
    catalog_ = std::move(by_text);
    return {};
  }

  // Of a tensor, the boxes that the file has, whose bytes are those of `array`.
  std::vector<Box> BoxesOf(const std::string& name, const Array& array) {
    std::vector<Box> boxes;
    const int64_t id = catalog_.Find(name);
    EXPECT_GE(id, 0) << name;
    const auto entry = static_cast<uint32_t>(id);
    EXPECT_EQ(catalog_.entry(entry).shape, array.shape);
    EXPECT_EQ(catalog_.entry(entry).dtype, array.dtype);
    const auto placements = catalog_.Placements(entry);
    EXPECT_OK(placements.status());
    for (const Placement& placement : *placements) {
      const std::string expected = BoxBytes(array, placement.box);
      EXPECT_TRUE(text_.substr(placement.offset, expected.size()) == expected)
          << name << " " << placement.box.ToString();
      boxes.push_back(placement.box);
    }
    return boxes;
  }

  WritePlan plan_;
  MemoryBoxes memory_;
  StagedFile file_;
  std::string text_;
  FileHeader header_;
  CatalogBuilder catalog_;
};

TEST_F(DataLayoutTest, RowsColumnsAndWhatLeavesAHole) {
  const Array rows = MakeArray(Dtype::kF32, {9, 5}, 1);
  const Array columns = MakeArray(Dtype::kBF16, {9, 6}, 2);
  const Array apart = MakeArray(Dtype::kI64, {8, 3}, 3);
  const Array single = MakeArray(Dtype::kF32, {7}, 4);
  Add("rows", rows, {{4, 0}, {3, 5}});
  Add("columns", columns, {{1, 4}, {8, 2}});
  Add("apart", apart, {{6, 0}, {1, 3}});
  Add("single", single, {{2}, {3}});
  Add("rows", rows, {{2, 0}, {2, 5}}, /*dense=*/false);
  Add("columns", columns, {{1, 1}, {8, 3}}, /*dense=*/false);
  Add("apart", apart, {{0, 1}, {2, 2}}, /*dense=*/false);
  Add("apart", apart, {{3, 0}, {0, 3}});
  ASSERT_OK(Write());
  EXPECT_EQ(header_.header.tensors.size(), 4u);
  EXPECT_EQ(BoxesOf("rows", rows), (std::vector<Box>{{{2, 0}, {5, 5}}}));
  EXPECT_EQ(BoxesOf("columns", columns), (std::vector<Box>{{{1, 1}, {8, 5}}}));
  EXPECT_EQ(BoxesOf("apart", apart),
            (std::vector<Box>{{{0, 1}, {2, 2}}, {{6, 0}, {1, 3}}}));
  EXPECT_EQ(BoxesOf("single", single), (std::vector<Box>{{{2}, {3}}}));
  for (size_t i = 0; i < header_.header.tensors.size(); ++i) {
    const SafetensorsEntry& entry = header_.header.tensors[i];
    EXPECT_TRUE(entry.name != "apart" || entry.shape == Dims{7});
    EXPECT_EQ(header_.sharding.entries[i].packed.empty(),
              entry.name != "apart");
  }
}

TEST_F(DataLayoutTest, WithoutJoiningBoxesStayApart) {
  const Array rows = MakeArray(Dtype::kF32, {4, 5}, 1);
  plan_.join = false;
  Add("rows", rows, {{2, 0}, {2, 5}});
  Add("rows", rows, {{0, 0}, {2, 5}});
  ASSERT_OK(Write());
  EXPECT_EQ(BoxesOf("rows", rows),
            (std::vector<Box>{{{0, 0}, {2, 5}}, {{2, 0}, {2, 5}}}));
}

TEST_F(DataLayoutTest, BoxesOfNothing) {
  const Array none = MakeArray(Dtype::kF32, {0, 5}, 1);
  const Array some = MakeArray(Dtype::kF32, {4, 5}, 2);
  Add("none", none, Box::Whole({0, 5}));
  Add("none", none, {{0, 2}, {0, 2}});
  Add("some", some, {{1, 0}, {0, 5}});
  Add("some", some, {{1, 0}, {3, 5}});
  ASSERT_OK(Write());
  EXPECT_EQ(BoxesOf("none", none).size(), 1u);
  EXPECT_EQ(BoxesOf("some", some), (std::vector<Box>{{{1, 0}, {3, 5}}}));
}

TEST_F(DataLayoutTest, BoxesThatDisagreeAreRefused) {
  const Array a = MakeArray(Dtype::kF32, {4, 5}, 1);
  const Array other_type = MakeArray(Dtype::kI32, {4, 5}, 2);
  const Array other_shape = MakeArray(Dtype::kF32, {5, 5}, 3);
  for (const Array* other : {&other_type, &other_shape}) {
    plan_.files[0].tensors.clear();
    Add("a", a, {{0, 0}, {1, 5}});
    Add("a", *other, {{1, 0}, {1, 5}});
    const Status status = Write();
    EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(status.tensor(), "a") << status.ToString();
  }
  plan_.files[0].tensors.clear();
  Add("a", a, {{0, 0}, {2, 5}});
  Add("a", a, {{1, 0}, {2, 5}});
  const Status status = Write();
  EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
  EXPECT_EQ(status.tensor(), "a");
}

TEST_F(DataLayoutTest, AnyBoxesComeBack) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    plan_.files[0].tensors.clear();
    memory_ = MemoryBoxes();
    std::map<std::string, Array> arrays;
    std::vector<std::tuple<std::string, Box>> boxes;
    for (const char* name : {"a", "b", "c"}) {
      Dims shape, parts;
      for (int d = 0; d < 1 + static_cast<int>(random() % 4); ++d) {
        shape.push_back(1 + static_cast<int64_t>(random() % 9));
        parts.push_back(1 + static_cast<int64_t>(random() % 3));
      }
      const Dtype dtype = random() % 2 ? Dtype::kF32 : Dtype::kU8;
      const Array& array = arrays[name] =
          MakeArray(dtype, shape, static_cast<uint32_t>(random()));
      const auto drop = random() % 3;  // none, or about every third
      for (const Piece& piece : GridPieces(name, array, parts)) {
        if (drop == 0 || random() % 3 != 0) boxes.push_back({name, piece.box});
      }
    }
    if (boxes.empty()) continue;
    std::shuffle(boxes.begin(), boxes.end(), random);
    std::map<std::string, int64_t> elements;
    for (const auto& [name, box] : boxes) {
      Add(name, arrays[name], box, random() % 2);
      elements[name] += box.Volume();
    }
    ASSERT_OK(Write());
    for (const auto& [name, volume] : elements) {
      const std::vector<Box> found = BoxesOf(name, arrays[name]);
      int64_t got = 0;
      for (const Box& box : found) got += box.Volume();
      EXPECT_EQ(got, volume) << name;
      EXPECT_TRUE(volume != arrays[name].shape.Product() || found.size() == 1);
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
