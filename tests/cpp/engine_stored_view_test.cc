#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/open/stored_view.h"
#include "engine_test_util.h"
#include "os_test_util.h"
#include "plan/copy_run.h"

namespace torch_ckpt {
namespace {

// A tensor in boxes that tile it, each of some kind, in some file.
struct Stored {
  Array array;
  std::vector<Placement> placements;
  std::vector<std::string> files;
  std::atomic<int> looks = 0;  // into archives

  CatalogEntry Entry() const {
    CatalogEntry entry;
    entry.dtype = array.dtype;
    entry.shape = array.shape;
    return entry;
  }
  Result<StoredViewPtr> View() {
    return StoredView::Make(
        Entry(), placements,
        [this](const Placement& archive) -> Result<StoredView::Resolved> {
          ++looks;
          Placement found = archive;
          found.kind = PlacementKind::kStridedBox;
          const UnitView view = *InUnits(array.dtype, array.shape, archive.box);
          found.strides = DenseStrides(view.box.sizes, view.unit_bytes);
          found.offset += 64;  // behind what the archive begins with
          return StoredView::Resolved{
              found,
              {archive.file, ByteRange::Of(found.offset, archive.bytes - 64),
               7}};
        });
  }
};

// Cuts `box` at random into boxes that tile it, rows of units never.
void CutBox(const Box& box, int64_t last_unit, int cuts, std::mt19937* random,
            std::vector<Box>* out) {
  const int dim =
      box.rank() == 0
          ? -1
          : static_cast<int>((*random)() % static_cast<unsigned>(box.rank()));
  const int64_t unit = dim == box.rank() - 1 ? last_unit : 1;
  if (cuts == 0 || dim < 0 || box.sizes[dim] <= unit) {
    out->push_back(box);
    return;
  }
  const int64_t at =
      unit *
      static_cast<int64_t>(
          1 + (*random)() % static_cast<uint64_t>((box.sizes[dim] - 1) / unit));
  Box low = box, high = box;
  low.sizes[dim] = at;
  high.offsets[dim] += at;
  high.sizes[dim] -= at;
  CutBox(low, last_unit, cuts - 1, random, out);
  CutBox(high, last_unit, cuts - 1, random, out);
}

void Store(Stored* stored, bool archives, std::mt19937* random) {
  const Array& array = stored->array;
  const Unit unit = DtypeUnit(array.dtype);
  stored->files.assign(3, "");
  std::vector<Box> boxes;
  CutBox(Box::Whole(array.shape), unit.elements, 3, random, &boxes);
  std::shuffle(boxes.begin(), boxes.end(), *random);
  for (const Box& box : boxes) {
    Placement placement;
    placement.file = static_cast<uint32_t>((*random)() % 3);
    placement.box = box;
    std::string& file = stored->files[placement.file];
    file += RandomBytes((*random)() % 7, 1);
    placement.offset = file.size();
    const std::string bytes = BoxBytes(array, box);
    if (archives && (*random)() % 2 == 0) {
      placement.kind = PlacementKind::kArchive;
      placement.bytes = 64 + bytes.size();
      file += RandomBytes(64, 2);
    }
    file += bytes;
    stored->placements.push_back(placement);
    if ((*random)() % 4 == 0) {
      placement.role = PlacementRole::kReplica;
      placement.file = 99;  // nobody reads it
      stored->placements.push_back(placement);
    }
  }
}

// A flat tensor in ranges of its row-major elements.
void StoreRanges(Stored* stored, std::mt19937* random) {
  const Array& array = stored->array;
  const Unit unit = DtypeUnit(array.dtype);
  stored->files.assign(3, "");
  const int64_t total = array.shape.Product();
  for (int64_t begin = 0; begin < total;) {
    Placement placement;
    placement.kind = PlacementKind::kRange;
    placement.file = static_cast<uint32_t>((*random)() % 3);
    placement.begin = begin;
    const auto units = static_cast<int64_t>(1 + (*random)() % 40);
    placement.end = std::min(total, begin + units * unit.elements);
    std::string& file = stored->files[placement.file];
    placement.offset = file.size();
    const auto bytes_of = [&](int64_t element) {
      return static_cast<size_t>(element / unit.elements * unit.bytes);
    };
    file += array.bytes.substr(bytes_of(begin),
                               bytes_of(placement.end) - bytes_of(begin));
    stored->placements.push_back(placement);
    begin = placement.end;
  }
}

std::string Execute(const std::vector<StoredRun>& runs,
                    const std::vector<std::string>& files, size_t size) {
  std::string out(size, '?');
  for (const auto& [file, run] : runs) {
    EXPECT_LE(run.src + run.SrcSpan(), files.at(file).size());
    CopyRun(run, reinterpret_cast<const std::byte*>(files[file].data()), 0,
            reinterpret_cast<std::byte*>(out.data()), 0);
  }
  return out;
}

uint64_t TotalBytes(const std::vector<StoredRun>& runs) {
  uint64_t bytes = 0;
  for (const StoredRun& each : runs) bytes += each.run.TotalBytes();
  return bytes;
}

void CheckBytes(const StoredView& view, const Stored& stored,
                std::mt19937* random) {
  const std::string& all = stored.array.bytes;
  for (int i = 0; i < 20; ++i) {
    uint64_t from = (*random)() % (all.size() + 1);
    uint64_t to = (*random)() % (all.size() + 1);
    if (from > to) std::swap(from, to);
    std::vector<StoredRun> runs;
    std::vector<DigestedRange> storages;
    ASSERT_OK(view.RunsOfBytes(from, to, 0, &runs, &storages));
    EXPECT_EQ(TotalBytes(runs), to - from);
    EXPECT_EQ(Execute(runs, stored.files, to - from),
              all.substr(from, to - from));
  }
}

TEST(StoredView, RandomBytesAndBoxesOfRandomLayouts) {
  std::mt19937 random(20);
  const Dtype dtypes[] = {Dtype::kU8, Dtype::kBF16, Dtype::kF64, Dtype::kF4,
                          Dtype::kF6E2M3};
  for (int round = 0; round < 400; ++round) {
    const Dtype dtype = dtypes[random() % 5];
    const int64_t unit = DtypeUnit(dtype).elements;
    Dims shape;
    const int rank = static_cast<int>(random() % 5);
    for (int d = 0; d < rank; ++d) {
      shape.push_back(static_cast<int64_t>(1 + random() % 6));
    }
    if (rank == 0 && unit > 1) continue;
    if (rank > 0) shape[rank - 1] *= unit;
    Stored stored;
    stored.array = MakeArray(dtype, shape, static_cast<uint32_t>(round));
    if (round % 3 == 0) {
      StoreRanges(&stored, &random);
    } else {
      Store(&stored, round % 3 == 1, &random);
    }
    const auto view = stored.View();
    ASSERT_OK(view.status());
    CheckBytes(**view, stored, &random);
    for (int i = 0; i < 10; ++i) {
      const Box box = RandomBox(shape, unit, &random);
      const UnitView wanted = *InUnits(dtype, shape, box);
      const std::string expected = BoxBytes(stored.array, box);
      std::vector<StoredRun> runs;
      std::vector<DigestedRange> storages;
      ASSERT_OK((*view)->RunsOfBox(
          {wanted.box, 0, DenseStrides(wanted.box.sizes, wanted.unit_bytes)},
          &runs, &storages));
      EXPECT_EQ(Execute(runs, stored.files, expected.size()), expected);
    }
    int archives = 0;
    for (const Placement& each : stored.placements) {
      archives += each.kind == PlacementKind::kArchive &&
                  each.role == PlacementRole::kOwner;
    }
    EXPECT_LE(stored.looks, archives) << "one thread looks into each once";
  }
}

// Sub-byte rows that are no whole number of bytes exist whole only.
TEST(StoredView, RowsThatCutBytesAreOneFlatBox) {
  std::mt19937 random(3);
  Stored stored;
  stored.array = MakeArray(Dtype::kF4, {4, 3}, 1);
  stored.files = {stored.array.bytes};
  stored.placements.resize(1);
  stored.placements[0].box = Box::Whole({4, 3});
  const auto view = stored.View();
  ASSERT_OK(view.status());
  CheckBytes(**view, stored, &random);
}

// What a piece of an output does not meet, it does not look into.
TEST(StoredView, LooksIntoTheArchivesThatAreMet) {
  constexpr int kRows = 64;
  Stored stored;
  stored.array = MakeArray(Dtype::kF32, {kRows, 16}, 1);
  stored.files.assign(1, "");
  for (int row = 0; row < kRows; ++row) {
    Placement& placement = stored.placements.emplace_back();
    placement.kind = PlacementKind::kArchive;
    placement.box = {{row, 0}, {1, 16}};
    placement.offset = stored.files[0].size();
    placement.bytes = 64 + 64;
    stored.files[0] +=
        RandomBytes(64, 2) + BoxBytes(stored.array, placement.box);
  }
  const auto view = stored.View();
  ASSERT_OK(view.status());
  std::vector<StoredRun> runs;
  std::vector<DigestedRange> storages;
  ASSERT_OK((*view)->RunsOfBytes(10 * 64, 12 * 64, 0, &runs, &storages));
  ASSERT_OK((*view)->RunsOfBytes(10 * 64, 12 * 64, 0, &runs, &storages));
  EXPECT_EQ(stored.looks, 2);
  EXPECT_EQ(storages.size(), 4u);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<StoredRun> own;
      std::vector<DigestedRange> ranges;
      EXPECT_OK((*view)->RunsOfBytes(0, kRows * 64, 0, &own, &ranges));
      EXPECT_EQ(Execute(own, stored.files, kRows * 64), stored.array.bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(stored.looks, kRows);
  EXPECT_LE(stored.looks, 4 * kRows) << "where two met one at once";
  const int looks = stored.looks;
  ASSERT_OK((*view)->RunsOfBytes(0, kRows * 64, 0, &runs, &storages));
  EXPECT_EQ(stored.looks, looks);
}

TEST(StoredView, AnArchiveThatFailsIsLookedIntoAgain) {
  Placement archive;
  archive.kind = PlacementKind::kArchive;
  archive.box = Box::Whole({4});
  CatalogEntry entry;
  entry.shape = {4};
  int looks = 0;
  const auto view = StoredView::Make(
      entry, {&archive, 1},
      [&](const Placement& place) -> Result<StoredView::Resolved> {
        if (++looks == 1) return Corrupt("is damaged");
        Placement found = place;
        found.kind = PlacementKind::kBox;
        return StoredView::Resolved{found, {}};
      });
  ASSERT_OK(view.status());
  std::vector<StoredRun> runs;
  std::vector<DigestedRange> storages;
  EXPECT_EQ((*view)->RunsOfBytes(0, 4, 0, &runs, &storages).kind(),
            ErrorKind::kCorrupt);
  EXPECT_OK((*view)->RunsOfBytes(0, 4, 0, &runs, &storages));
  EXPECT_EQ(runs.size(), 1u);
  EXPECT_TRUE(storages.empty()) << "nothing is known of it";
}

TEST(StoredView, HolesAreAnError) {
  Placement half;
  half.box = {{0}, {2}};
  CatalogEntry entry;
  entry.name = "half";
  entry.shape = {4};
  const auto view = StoredView::Make(entry, {&half, 1});
  ASSERT_OK(view.status());
  std::vector<StoredRun> runs;
  std::vector<DigestedRange> storages;
  EXPECT_OK((*view)->RunsOfBytes(0, 2, 0, &runs, &storages));
  const Status hole = (*view)->RunsOfBytes(1, 3, 0, &runs, &storages);
  EXPECT_EQ(hole.kind(), ErrorKind::kInternal);
  EXPECT_EQ(hole.tensor(), "half");
}

StoredViewPtr ViewOfPieces(int64_t pieces) {
  std::vector<Placement> placements(static_cast<size_t>(pieces));
  for (int64_t i = 0; i < pieces; ++i) {
    placements[static_cast<size_t>(i)].box = {{i}, {1}};
  }
  CatalogEntry entry;
  entry.shape = {pieces};
  return *StoredView::Make(entry, placements);
}

TEST(StoredView, APieceTakesWhatItNeeds) {
  const uint64_t memory = ViewOfPieces(10'000)->memory();
  EXPECT_LE(memory / 10'000, 56u);
}

TEST(StoredViews, ThoseThatWereAskedForLastStay) {
  StoredViews views;
  int made = 0;
  const auto get = [&](uint32_t entry, int64_t pieces) {
    const auto view = views.Get(entry, [&]() -> Result<StoredViewPtr> {
      ++made;
      return ViewOfPieces(pieces);
    });
    ASSERT_OK(view.status());
  };
  for (int round = 0; round < 3; ++round) {
    for (uint32_t e = 0; e < 1000; ++e) get(e, 10);
  }
  EXPECT_EQ(made, 1000) << "small ones";
  made = 0;
  for (int round = 0; round < 3; ++round) {
    for (uint32_t e = 2000; e < 2040; ++e) get(e, 20'000);
  }
  EXPECT_EQ(made, 120) << "40 MiB of large ones, of which 8 stay";
  get(2039, 20'000);
  get(2035, 20'000);
  EXPECT_EQ(made, 120);
}

TEST(StoredViews, WhoAsksMeanwhileWaitsAndAnErrorIsNotKept) {
  StoredViews views;
  const auto fails =
      views.Get(1, []() -> Result<StoredViewPtr> { return Corrupt("no"); });
  EXPECT_EQ(fails.status().kind(), ErrorKind::kCorrupt);
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      EXPECT_OK(views
                    .Get(1,
                         [&]() -> Result<StoredViewPtr> {
                           ++made;
                           std::this_thread::yield();
                           return ViewOfPieces(5);
                         })
                    .status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
}

}  // namespace
}  // namespace torch_ckpt
