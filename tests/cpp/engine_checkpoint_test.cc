// Opening a checkpoint whose digests all fit and whose catalog is a lie.
#include <functional>

#include "engine/open/checkpoint.h"
#include "engine_test_util.h"
#include "format/ours/catalog_builder.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

class ForgedCatalogTest : public EngineDiskTest {
 protected:
  // Saves `a` in three rows of boxes and one tensor beside it.
  void SetUp() override {
    EngineDiskTest::SetUp();
    std::vector<Piece> pieces = GridPieces("a", a_, {3, 1});
    pieces.push_back(WholePiece("b", b_, 0));
    ASSERT_OK(SaveAll(Path("c"), pieces).status());
    catalog_text_ = ReadText(CatalogPath());
    manifest_text_ = ReadText(Path("c/") + std::string(kManifestName));
  }

  std::string CatalogPath() const {
    return Path("c/") + std::string(kCatalogName);
  }

  // What a catalog says of tensor `a`.
  struct Entry {
    EntryKind kind = EntryKind::kTensor;
    std::string alias_of;
    uint32_t file = 0;
    std::vector<Placement> placements;
  };

  // Writes the catalog with `change` made to `a`, and a manifest that fits it.
  void Forge(const std::function<void(Entry*)>& change) {
    auto manifest = ParseManifest(AsBytes(manifest_text_));
    ASSERT_OK(manifest.status());
    const auto catalog = Catalog::Parse(catalog_text_, manifest->files);
    ASSERT_OK(catalog.status());
    CatalogBuilder forged;
    for (uint32_t e = 0; e < catalog->entries().size(); ++e) {
      const CatalogEntry& entry = catalog->entries()[e];
      const std::string name(entry.name);
      Entry of{EntryKind::kTensor, "", 0,
               *catalog->Placements(e, manifest->files)};
      if (name == "a") change(&of);
      if (of.kind == EntryKind::kAlias) {
        ASSERT_OK(forged.AddAlias(name, of.alias_of).status());
      } else if (of.kind == EntryKind::kObject) {
        ASSERT_OK(forged.AddObject(name, of.file).status());
      } else {
        const auto id = forged.AddTensor(name, entry.dtype, entry.shape);
        ASSERT_OK(id.status());
        forged.SetPlacements(*id, of.placements);
      }
    }
    const std::string text = *forged.Encode();
    WriteText(CatalogPath(), text);
    for (ManifestFile& file : manifest->files) {
      if (file.role != FileRole::kCatalog) continue;
      file.bytes = text.size();
      file.crc32c = {Crc32c(0, text.data(), text.size())};
    }
    WriteText(Path("c/") + std::string(kManifestName),
              EncodeManifest(*manifest));
  }

  // Whoever wants `a`, or all; another tensor is there as before.
  void ExpectRefused() {
    const Status status = ReadTensor("a");
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
    EXPECT_EQ(status.tensor(), "a");
    EXPECT_NE(status.file().find(kCatalogName), std::string::npos);
    EXPECT_FALSE(Merge(Path("c"), Path("out")).ok());
    EXPECT_EQ(Names(root()), std::vector<std::string>{"c"});
  }

  Status ReadTensor(const std::string& name) {
    auto checkpoint = OpenCheckpoint(Path("c"));
    if (!checkpoint.ok()) return checkpoint.status();
    const auto id = static_cast<size_t>((*checkpoint)->catalog().Find(name));
    const Dims shape = (*checkpoint)->catalog().entries()[id].shape;
    return ReadBox(*checkpoint, name, Box::Whole(shape)).status();
  }

  const Array a_ = MakeArray(Dtype::kF32, {300, 400}, 1);
  const Array b_ = MakeArray(Dtype::kI64, {5}, 2);
  std::string catalog_text_, manifest_text_;
};

TEST_F(ForgedCatalogTest, TheSameCatalogIsTaken) {
  Forge([](Entry*) {});
  EXPECT_OK(ReadTensor("a"));
}

TEST_F(ForgedCatalogTest, AHoleIsRefused) {
  Forge([](Entry* a) { a->placements.pop_back(); });
  ExpectRefused();
  EXPECT_OK(ReadTensor("b"));
  Forge([](Entry* a) { a->placements.clear(); });
  ExpectRefused();
}

// As many bytes as before: what is missing equals what is there twice.
TEST_F(ForgedCatalogTest, AnOverlapIsRefused) {
  Forge([](Entry* a) {
    a->placements[1].box.offsets = a->placements[0].box.offsets;
  });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, ReplicasProveNothing) {
  Forge([](Entry* a) { a->placements[1].role = PlacementRole::kReplica; });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, AnObjectInADataFileIsRefused) {
  Forge([](Entry* a) { a->kind = EntryKind::kObject; });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, AnAliasOfNoTensorIsRefused) {
  Forge([](Entry* a) {
    a->kind = EntryKind::kAlias;
    a->alias_of = "nobody";
  });
  ExpectRefused();
}

// Nothing writes these yet; reading them is what the format promises.
TEST_F(ForgedCatalogTest, RangesAndStridedBoxesAreRead) {
  // Rank 1 has rows 100 to 200 of 300 x 400: the same bytes as a range.
  Forge([](Entry* a) {
    Placement& rows = a->placements[1];
    rows.kind = PlacementKind::kRange;
    rows.begin = rows.box.offsets[0] * 400;
    rows.end = rows.begin + rows.box.sizes[0] * 400;
    rows.box = {};
  });
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ(*ReadBox(*checkpoint, "a", Box::Whole(a_.shape)), a_.bytes);
  const Box across{{90, 7}, {150, 300}};
  EXPECT_EQ(*ReadBox(*checkpoint, "a", across), BoxBytes(a_, across));
  ASSERT_OK(Merge(Path("c"), Path("merged")).status());
  EXPECT_EQ(ReadAll(Path("merged"))->at("a"), a_.bytes);
  // Ranges that cut rows: 2n - 1 boxes each.
  Forge([](Entry* a) {
    for (Placement& p : a->placements) {
      p.kind = PlacementKind::kRange;
      p.begin = p.box.offsets[0] * 400;
      p.end = p.begin + p.box.sizes[0] * 400;
      p.box = {};
    }
    // The same bytes, cut elsewhere: the second holds the end of the first.
    Placement tail = a->placements[0];
    tail.begin = tail.end - 450;
    tail.offset += static_cast<uint64_t>(tail.begin) * 4;
    a->placements[0].end = tail.begin;
    a->placements.push_back(tail);
  });
  checkpoint = OpenCheckpoint(Path("c"));
  EXPECT_EQ(*ReadBox(*checkpoint, "a", Box::Whole(a_.shape)), a_.bytes);
  EXPECT_EQ(*ReadBox(*checkpoint, "a", across), BoxBytes(a_, across));
  // Every other row of what is stored, twice.
  Forge([](Entry* a) {
    Placement even = a->placements[0];
    even.kind = PlacementKind::kStridedBox;
    even.box.sizes[0] /= 2;
    even.strides = {3200, 4};
    Placement odd = even;
    odd.box.offsets[0] = 50;
    odd.offset += 1600;
    a->placements[0] = even;
    a->placements.push_back(odd);
  });
  std::string want;
  for (int64_t first : {0, 1}) {
    for (int64_t row = first; row < 100; row += 2) {
      want += BoxBytes(a_, {{row, 0}, {1, 400}});
    }
  }
  checkpoint = OpenCheckpoint(Path("c"));
  EXPECT_EQ(*ReadBox(*checkpoint, "a", {{0, 0}, {100, 400}}), want);
  ASSERT_OK(Merge(Path("c"), Path("rows")).status());
  EXPECT_EQ(ReadAll(Path("rows"))->at("a").substr(0, want.size()), want);
}

// Known from the manifest, before any memory is taken for it.
TEST_F(ForgedCatalogTest, AHugeCatalogIsNotRead) {
  auto manifest = ParseManifest(AsBytes(manifest_text_));
  ASSERT_OK(manifest.status());
  for (ManifestFile& file : manifest->files) {
    if (file.role != FileRole::kCatalog) continue;
    file.bytes = uint64_t{1} << 33;
    file.crc32c.assign(file.bytes / kSegmentBytes, 0);
    std::filesystem::resize_file(CatalogPath(), file.bytes);
  }
  WriteText(Path("c/") + std::string(kManifestName), EncodeManifest(*manifest));
  const Status status = OpenCheckpoint(Path("c")).status();
  EXPECT_EQ(status.kind(), ErrorKind::kUnsupported) << status.ToString();
}

}  // namespace
}  // namespace torch_ckpt
