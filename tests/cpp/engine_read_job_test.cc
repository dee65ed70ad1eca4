#include <atomic>
#include <cerrno>
#include <filesystem>
#include <random>

#include "engine/read/read_job.h"
#include "engine_test_util.h"
#include "os/fault.h"
#include "os_test_util.h"
#include "plan/runs.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

using ReadJobTest = EngineDiskTest;

TEST_F(ReadJobTest, SameLayoutAndOtherBoxes) {
  const Array a = MakeArray(Dtype::kF32, {37, 53}, 1);
  const Array s = MakeArray(Dtype::kI64, {}, 2);
  const Array e = MakeArray(Dtype::kF16, {0, 9}, 3);
  std::vector<Piece> pieces = GridPieces("a", a, {3, 2});
  pieces.push_back(WholePiece("s", s, 1));
  pieces.push_back(WholePiece("e", e, 2));
  ASSERT_OK(SaveAll(Path("c"), pieces).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ((*checkpoint)->source(), kManifestSource);
  EXPECT_EQ(*ReadBox(*checkpoint, "a", Box::Whole(a.shape)), a.bytes);
  EXPECT_EQ(*ReadBox(*checkpoint, "s", {}), s.bytes);
  EXPECT_EQ(*ReadBox(*checkpoint, "e", Box::Whole(e.shape)), "");
  for (const Piece& piece : pieces) {
    EXPECT_EQ(*ReadBox(*checkpoint, piece.name, piece.box),
              BoxBytes(*piece.array, piece.box));
  }
  std::mt19937 random(4);
  for (int i = 0; i < 50; ++i) {
    const Box box = RandomBox(a.shape, 1, &random);
    EXPECT_EQ(*ReadBox(*checkpoint, "a", box, i % 2 == 0), BoxBytes(a, box))
        << box.ToString();
  }
}

TEST_F(ReadJobTest, SubByteBoxes) {
  const Array f4 = MakeArray(Dtype::kF4, {5, 12}, 1);
  const Array f6 = MakeArray(Dtype::kF6E2M3, {4, 16}, 2);
  const Array odd = MakeArray(Dtype::kF4, {2, 3}, 3);
  std::vector<Piece> pieces = GridPieces("f4", f4, {2, 3});
  for (Piece& p : GridPieces("f6", f6, {1, 4})) pieces.push_back(p);
  pieces.push_back(WholePiece("odd", odd));
  ASSERT_OK(SaveAll(Path("c"), pieces).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ(*ReadBox(*checkpoint, "odd", Box::Whole(odd.shape)), odd.bytes);
  std::mt19937 random(4);
  for (int i = 0; i < 20; ++i) {
    const Box four = RandomBox(f4.shape, 2, &random);
    EXPECT_EQ(*ReadBox(*checkpoint, "f4", four), BoxBytes(f4, four));
    const Box six = RandomBox(f6.shape, 4, &random);
    EXPECT_EQ(*ReadBox(*checkpoint, "f6", six), BoxBytes(f6, six));
  }
  const Box cut{{0, 1}, {5, 2}};
  EXPECT_EQ(ReadBox(*checkpoint, "f4", cut).status().kind(),
            ErrorKind::kUnsupported);
}

// One job with several items whose bytes share segments and cells, some of
// them the very same bytes.
TEST_F(ReadJobTest, ItemsThatOverlap) {
  const Array a = MakeArray(Dtype::kF32, {1024, 1024}, 1);  // 4 MiB
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  const std::vector<Box> boxes = {
      Box::Whole(a.shape),     {{0, 0}, {1024, 1024}}, {{0, 0}, {512, 1024}},
      {{100, 0}, {700, 1024}}, {{3, 5}, {1000, 3}},    {{511, 0}, {2, 1024}},
      {{0, 1023}, {1024, 1}}};
  for (const bool verify : {true, false}) {
    std::vector<std::string> memory;
    for (const Box& box : boxes) {
      memory.emplace_back(static_cast<size_t>(box.Volume()) * 4, '\0');
    }
    std::vector<TargetTensor> targets;
    ReadPlan plan;
    plan.verify = verify;
    for (size_t i = 0; i < boxes.size(); ++i) {
      targets.push_back({reinterpret_cast<std::byte*>(memory[i].data()),
                         boxes[i].sizes, DenseStrides(boxes[i].sizes, 4), 4});
      plan.items.push_back({"a", boxes[i], {}, i});
    }
    Job job;
    auto report = RunReadJob(*checkpoint, plan, targets, &job);
    ASSERT_OK(report.status());
    for (size_t i = 0; i < boxes.size(); ++i) {
      EXPECT_TRUE(memory[i] == BoxBytes(a, boxes[i])) << boxes[i].ToString();
    }
    EXPECT_EQ(job.done(), job.total());
    EXPECT_EQ(report->bytes_verified > 0, verify);
  }
}

TEST_F(ReadJobTest, LargeFilesInManyCells) {
  const Array a = MakeArray(Dtype::kF32, {1000, 5000}, 1);  // 19 MiB
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {1, 2})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  const std::vector<Box> boxes = {
      Box::Whole(a.shape), {{0, 2400}, {1000, 200}}, {{999, 0}, {1, 5000}}};
  for (const Box& box : boxes) {
    for (const int workers : {1, 3}) {
      EXPECT_TRUE(*ReadBox(*checkpoint, "a", box, true, workers) ==
                  BoxBytes(a, box));
    }
    EXPECT_TRUE(*ReadBox(*checkpoint, "a", box, false) == BoxBytes(a, box));
  }
}

#ifdef TORCH_CKPT_FAULTS
// Whatever leaves bytes out, the job adds up what it has delivered.
TEST_F(ReadJobTest, WhatIsNotDeliveredIsAnError) {
  const Array a = MakeArray(Dtype::kF32, {1000, 1000}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  SetFaultHook([](const FaultSite& site) {
    return FaultAction{.skip = std::string_view(site.op) == "piece"};
  });
  for (const bool verify : {true, false}) {
    const Status status =
        ReadBox(*checkpoint, "a", Box::Whole(a.shape), verify).status();
    EXPECT_EQ(status.kind(), ErrorKind::kInternal) << status.ToString();
    EXPECT_NE(status.ToString().find("delivered"), std::string::npos);
  }
  SetFaultHook(nullptr);
  EXPECT_TRUE(*ReadBox(*checkpoint, "a", Box::Whole(a.shape), true) ==
              BoxBytes(a, Box::Whole(a.shape)));
}
#endif

TEST_F(ReadJobTest, PartialLoadReadsOnlyWhatItNeeds) {
  const Array a = MakeArray(Dtype::kF32, {16, 1 << 18}, 1);  // 16 MiB
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  std::string memory(4096, '\0');
  const Box box{{9, 1000}, {1, 1024}};
  for (const bool verify : {true, false}) {
    ReadPlan plan;
    plan.verify = verify;
    plan.items.push_back({"a", box, {}, 0});
    Job job;
    auto report = RunReadJob(*checkpoint, plan,
                             {{reinterpret_cast<std::byte*>(memory.data()),
                               {1, 1024},
                               {4096, 4},
                               4}},
                             &job);
    ASSERT_OK(report.status());
    EXPECT_EQ(memory, BoxBytes(a, box));
    EXPECT_EQ(report->bytes_needed, 4096u);
    EXPECT_LE(report->bytes_read, verify ? 2 * kSegmentBytes : 8192);
  }
}

// Of rows of 1 MiB 128 KiB each: what lies between is not read.
TEST_F(ReadJobTest, GapsBetweenShortRowsAreLeftOut) {
  const Array a = MakeArray(Dtype::kU8, {2, 16, 1 << 20}, 1);  // 32 MiB
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  const auto read = [&](const Box& box, bool verify) {
    std::string memory(static_cast<size_t>(box.sizes.Product()), '\0');
    ReadPlan plan;
    plan.verify = verify;
    plan.items.push_back({"a", box, {}, 0});
    Job job;
    const auto report =
        RunReadJob(*checkpoint, plan,
                   {{reinterpret_cast<std::byte*>(memory.data()), box.sizes,
                     DenseStrides(box.sizes, 1), 1}},
                   &job);
    EXPECT_OK(report.status());
    EXPECT_TRUE(memory == BoxBytes(a, box));
    return report.ok() ? report->bytes_read : 0;
  };
  const Box columns{{0, 3, 1000}, {2, 10, 128 << 10}};
  EXPECT_EQ(read(columns, false), 20u * (128 << 10));
  // Gaps that a read costs more than are filled.
  const Box most{{0, 0, 0}, {2, 16, (1 << 20) - (32 << 10)}};
  EXPECT_GT(read(most, false), uint64_t{31} << 20);
  // Segments are read whole, but none that nothing is wanted of.
  const Box every{{0, 0, 1000}, {2, 16, 1000}};
  EXPECT_LE(read(every, false), 40000u);
  const Box two_rows{{0, 1, 0}, {2, 1, 1 << 20}};
  EXPECT_LE(read(two_rows, true), 4 * kSegmentBytes);
}

TEST_F(ReadJobTest, TargetsNeedNotBeContiguous) {
  const Array a = MakeArray(Dtype::kI32, {20, 30}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 2})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  // Transposed, every element followed by a gap that must stay as it is.
  std::string memory(20 * 30 * 8, '#');
  ReadPlan plan;
  plan.items.push_back({"a", Box::Whole(a.shape), {}, 0});
  Job job;
  ASSERT_OK(RunReadJob(*checkpoint, plan,
                       {{reinterpret_cast<std::byte*>(memory.data()),
                         {20, 30},
                         {8, 160},
                         4}},
                       &job)
                .status());
  for (size_t i = 0; i < 20; ++i) {
    for (size_t j = 0; j < 30; ++j) {
      const size_t at = i * 8 + j * 160;
      ASSERT_EQ(memory.substr(at, 4), a.bytes.substr((i * 30 + j) * 4, 4));
      ASSERT_EQ(memory.substr(at + 4, 4), "####");
    }
  }
}

TEST_F(ReadJobTest, RefusesBeforeAByteIsCopied) {
  const Array a = MakeArray(Dtype::kF32, {8, 8}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  EXPECT_EQ(ReadBox(*checkpoint, "a", {{4, 0}, {5, 8}}).status().kind(),
            ErrorKind::kInvalidArgument);
  std::string memory(256, '#');
  const TargetTensor target{
      reinterpret_cast<std::byte*>(memory.data()), {8, 8}, {32, 4}, 4};
  const auto run = [&](std::vector<ReadItem> items) {
    ReadPlan plan;
    plan.items = std::move(items);
    Job job;
    return RunReadJob(*checkpoint, plan, {target}, &job).status();
  };
  const Status unknown =
      run({{"a", Box::Whole(a.shape), {}, 0}, {"b", {}, {}, 0}});
  EXPECT_EQ(unknown.kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(unknown.tensor(), "b");
  EXPECT_EQ(run({{"a", {{0, 0}, {4, 8}}, {}, 0}}).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(run({{"a", Box::Whole(a.shape), {}, 1}}).kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(memory, std::string(256, '#'));
}

TEST_F(ReadJobTest, EveryFlippedByteOfTheDataIsSeen) {
  const Array a = MakeArray(Dtype::kF32, {16, 16}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1})).status());
  const std::string file = Path("c/") + ShardFileName(1, 1, 1);
  const std::string good = ReadText(file);
  for (size_t at = 0; at < good.size(); at += at < 4096 ? 37 : 1) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
    WriteText(file, bad);
    auto all = ReadAll(Path("c"));
    ASSERT_EQ(all.status().kind(), ErrorKind::kCorrupt) << at;
    ASSERT_NE(all.status().ToString().find("shard-00002"), std::string::npos);
  }
  WriteText(file, good);
  EXPECT_EQ(ReadAll(Path("c")).value().at("a"), a.bytes);
}

// In steps that one run fills, which are copied and digested in one pass; from
// the page cache, and past it where the file system can.
TEST_F(ReadJobTest, FlippedBytesOfLargeTensorsAreSeen) {
  const Array a = MakeArray(Dtype::kF32, {3, 1 << 18}, 1);  // 3 MiB
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  const std::string file = Path("c/") + ShardFileName(0, 1, 1);
  const std::string good = ReadText(file);
  const uint64_t step = kDigestStep, data = kDataAlignment;
  for (const bool cached : {true, false}) {
    const auto read = [&] {
      if (!cached) DropCache(file);
      return ReadAll(Path("c"));
    };
    for (const uint64_t at :
         {data, step, step + 1, 2 * step - 1, 2 * step + step / 2,
          good.size() - step - 1, good.size() - 1}) {
      for (const int bit : {0, 7}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
        WriteText(file, bad);
        ASSERT_EQ(read().status().kind(), ErrorKind::kCorrupt) << at;
      }
    }
    WriteText(file, good);
    auto all = read();
    ASSERT_OK(all.status());
    EXPECT_TRUE(all->at("a") == a.bytes);
  }
}

TEST_F(ReadJobTest, MissingShortLongAndForeignFilesAreNamed) {
  const Array a = MakeArray(Dtype::kF32, {16, 16}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {2, 1})).status());
  ASSERT_OK(SaveAll(Path("d"), GridPieces("a", a, {2, 1})).status());
  const std::string name = ShardFileName(0, 1, 1);
  const std::string file = Path("c/") + name;
  const std::string good = ReadText(file);
  const auto expect = [&](ErrorKind kind, const char* what) {
    // Whoever does not need it, is not told.
    EXPECT_OK(OpenCheckpoint(Path("c")).status());
    const Status status = ReadAll(Path("c")).status();
    EXPECT_EQ(status.kind(), kind) << what << ": " << status.ToString();
    EXPECT_NE(status.ToString().find(name), std::string::npos) << what;
  };
  std::filesystem::remove(file);
  expect(ErrorKind::kIncomplete, "missing");
  WriteText(file, good.substr(0, good.size() - 1));
  expect(ErrorKind::kCorrupt, "short");
  WriteText(file, good + "x");
  expect(ErrorKind::kCorrupt, "long");
  WriteText(file, ReadText(Path("d/") + name));  // same size, other save
  expect(ErrorKind::kCorrupt, "foreign");
  std::filesystem::remove(file);
  std::filesystem::create_directory(file);
  expect(ErrorKind::kCorrupt, "a directory");
  std::filesystem::remove(file);
  WriteText(file, good);
  for (const char* part : {"torch_ckpt.catalog", "torch_ckpt.json"}) {
    const std::string text = ReadText(Path(std::string("c/") + part));
    for (size_t size :
         {size_t{0}, size_t{1}, text.size() / 2, text.size() - 1}) {
      WriteText(Path(std::string("c/") + part), text.substr(0, size));
      EXPECT_EQ(OpenCheckpoint(Path("c")).status().kind(), ErrorKind::kCorrupt)
          << part << " cut to " << size;
    }
    WriteText(Path(std::string("c/") + part), text);
  }
  EXPECT_TRUE(ReadAll(Path("c")).ok());
}

// The reader opened one save; another one stands there when it reads.
TEST_F(ReadJobTest, ASaveUnderAnOpenCheckpointIsAConflict) {
  const Array old_array = MakeArray(Dtype::kF32, {16, 16}, 1);
  const Array new_array = MakeArray(Dtype::kF32, {16, 16}, 2);
  SaveSettings settings;
  settings.object = "{\"step\": 1}";
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", old_array, {2, 1}), settings)
                .status());
  for (const bool verify : {true, false}) {
    auto opened = OpenCheckpoint(Path("c"));
    ASSERT_OK(opened.status());
    settings.object = "{\"step\": 2}";
    ASSERT_OK(SaveAll(Path("c"), GridPieces("a", new_array, {2, 1}), settings)
                  .status());
    auto read = ReadBox(*opened, "a", Box::Whole(old_array.shape), verify);
    ASSERT_FALSE(read.ok());
    EXPECT_EQ(read.status().kind(), ErrorKind::kConflict)
        << read.status().ToString();
    EXPECT_NE(read.status().ToString().find("is being replaced"),
              std::string::npos);
    std::string memory(settings.object.size(), '\0');
    ReadPlan plan;
    plan.verify = verify;
    plan.items.push_back({"step", {}, ObjectFileName(0), 0});
    Job job;
    const Status object =
        RunReadJob(*opened, plan,
                   {{reinterpret_cast<std::byte*>(memory.data()),
                     {static_cast<int64_t>(memory.size())},
                     {1},
                     1}},
                   &job)
            .status();
    EXPECT_EQ(object.kind(), ErrorKind::kConflict) << object.ToString();
    const FileSet& files = *(*opened)->file_set();
    const auto at = static_cast<uint32_t>(files.FindFile(ObjectFileName(0)));
    EXPECT_EQ(files.ReadWhole(at).status().kind(), ErrorKind::kConflict);
    // Back to the old bytes for the second round.
    settings.object = "{\"step\": 1}";
    ASSERT_OK(SaveAll(Path("c"), GridPieces("a", old_array, {2, 1}), settings)
                  .status());
  }
}

TEST_F(ReadJobTest, CancelStops) {
  const Array a = MakeArray(Dtype::kF32, {64, 64}, 1);
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  std::string memory(a.bytes.size(), '\0');
  ReadPlan plan;
  plan.items.push_back({"a", Box::Whole(a.shape), {}, 0});
  Job job;
  job.Cancel();
  EXPECT_EQ(
      RunReadJob(
          *checkpoint, plan,
          {{reinterpret_cast<std::byte*>(memory.data()), a.shape, {256, 4}, 4}},
          &job)
          .status()
          .kind(),
      ErrorKind::kCancelled);
}

#ifdef TORCH_CKPT_FAULTS
TEST_F(ReadJobTest, AReadErrorNamesTheFile) {
  const Array a = MakeArray(Dtype::kF32, {64, 64}, 1);
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool read = std::string(site.op).starts_with("pread");
    return {.sys_errno = read ? EIO : 0};
  });
  const Status status = ReadBox(*checkpoint, "a", Box::Whole(a.shape)).status();
  SetFaultHook(nullptr);
  EXPECT_EQ(status.sys_errno(), EIO);
  EXPECT_NE(status.file().find("shard-00001"), std::string::npos);
}
#endif

}  // namespace
}  // namespace torch_ckpt
