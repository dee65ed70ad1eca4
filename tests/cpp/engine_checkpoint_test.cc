// Opening a checkpoint whose digests all fit and whose catalog is a lie.
#include <functional>

#include "engine/checkpoint.h"
#include "engine_test_util.h"
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

  // Writes the catalog with `change` made to `a` and its placements, and a
  // manifest that fits it.
  using Change = std::function<void(CatalogEntry*, std::vector<Placement>*)>;

  void Forge(const Change& change) {
    auto catalog = DecodeCatalog(AsBytes(catalog_text_));
    ASSERT_OK(catalog.status());
    Catalog forged;
    for (const CatalogFile& file : catalog->files()) forged.AddFile(file);
    for (uint32_t e = 0; e < catalog->entries().size(); ++e) {
      CatalogEntry entry = catalog->entries()[e];
      const auto placed = catalog->placements(e);
      std::vector<Placement> placements(placed.begin(), placed.end());
      if (entry.name == "a") change(&entry, &placements);
      ASSERT_OK(forged.AddEntry(std::move(entry)).status());
      for (const Placement& placement : placements) {
        ASSERT_OK(forged.AddPlacement(e, placement));
      }
    }
    const std::string text = EncodeCatalog(forged);
    WriteText(CatalogPath(), text);
    auto manifest = ParseManifest(AsBytes(manifest_text_));
    ASSERT_OK(manifest.status());
    for (ManifestFile& file : manifest->files) {
      if (file.role != FileRole::kCatalog) continue;
      file.bytes = text.size();
      file.crc32c = {Crc32c(0, text.data(), text.size())};
    }
    WriteText(Path("c/") + std::string(kManifestName),
              EncodeManifest(*manifest));
  }

  void ExpectRefused(ErrorKind kind = ErrorKind::kCorrupt) {
    const Status status = OpenCheckpoint(Path("c")).status();
    EXPECT_EQ(status.kind(), kind) << status.ToString();
    EXPECT_EQ(status.tensor(), "a");
    EXPECT_NE(status.file().find(kCatalogName), std::string::npos);
    EXPECT_FALSE(Merge(Path("c"), Path("out")).ok());
    EXPECT_EQ(Names(root()), std::vector<std::string>{"c"});
  }

  const Array a_ = MakeArray(Dtype::kF32, {300, 400}, 1);
  const Array b_ = MakeArray(Dtype::kI64, {5}, 2);
  std::string catalog_text_, manifest_text_;
};

TEST_F(ForgedCatalogTest, TheSameCatalogIsTaken) {
  Forge([](CatalogEntry*, std::vector<Placement>*) {});
  EXPECT_OK(OpenCheckpoint(Path("c")).status());
}

TEST_F(ForgedCatalogTest, AHoleIsRefused) {
  Forge([](CatalogEntry*, std::vector<Placement>* placements) {
    placements->pop_back();
  });
  ExpectRefused();
  Forge([](CatalogEntry*, std::vector<Placement>* placements) {
    placements->clear();
  });
  ExpectRefused();
}

// As many bytes as before: what is missing equals what is there twice.
TEST_F(ForgedCatalogTest, AnOverlapIsRefused) {
  Forge([](CatalogEntry*, std::vector<Placement>* placements) {
    (*placements)[1].box.offsets = (*placements)[0].box.offsets;
  });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, ReplicasProveNothing) {
  Forge([](CatalogEntry*, std::vector<Placement>* placements) {
    (*placements)[1].role = PlacementRole::kReplica;
  });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, AnObjectInADataFileIsRefused) {
  Forge([](CatalogEntry* entry, std::vector<Placement>* placements) {
    entry->kind = EntryKind::kObject;
    entry->shape = {};
    placements->resize(1);
    (*placements)[0].box = Box::Whole(entry->shape);
  });
  ExpectRefused();
}

TEST_F(ForgedCatalogTest, AnAliasOfATensorThatIsNotLikeIt) {
  Forge([](CatalogEntry* entry, std::vector<Placement>* placements) {
    entry->kind = EntryKind::kAlias;
    entry->alias_of = "b";
    placements->clear();
  });
  ExpectRefused();
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
