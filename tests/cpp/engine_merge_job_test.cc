#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "engine/merge/merge_job.h"
#include "engine/open/header_io.h"
#include "engine_test_util.h"
#include "format/safetensors/hf_index.h"

namespace torch_ckpt {
namespace {

class MergeJobTest : public EngineDiskTest {
 protected:
  // Saves the pieces, merges, and compares every tensor of the output.
  void Expect(const std::vector<Piece>& pieces,
              const MergeSettings& settings = {}) {
    SaveSettings save;
    save.object = "{\"step\": 3}";
    save.output.direct_io = settings.output.direct_io;
    ASSERT_OK(SaveAll(Path("in"), pieces, save).status());
    auto merged = Merge(Path("in"), Path("out"), settings);
    ASSERT_OK(merged.status());
    ExpectOutput(pieces);
  }

  void ExpectOutput(const std::vector<Piece>& pieces) {
    auto all = ReadAll(Path("out"));
    ASSERT_OK(all.status());
    for (const Piece& piece : pieces) {
      EXPECT_TRUE(all->at(piece.name) == piece.array->bytes) << piece.name;
    }
    EXPECT_EQ(all->at("step"), "{\"step\": 3}");
    // Other readers see whole tensors at the offsets of plain headers.
    auto out = Directory::Open(Path("out"));
    std::map<std::string, std::string> seen;
    for (const std::string& name : Names(Path("out"))) {
      if (!name.ends_with(".safetensors")) continue;
      auto opened = out->OpenFile(name, {});
      ASSERT_OK(opened.status());
      const File& file = *opened;
      auto header = ReadFileHeader(file, *file.Stat());
      ASSERT_OK(header.status());
      EXPECT_EQ(header->header.data_begin % kDataAlignment, 0u);
      EXPECT_EQ(*header->header.FindMetadata("format"), "pt");
      EXPECT_FALSE(header->sharding.has_sharding_info);
      const std::string text = ReadText(file.path());
      for (const SafetensorsEntry& entry : header->header.tensors) {
        EXPECT_TRUE(
            seen.emplace(entry.name,
                         text.substr(header->header.data_begin + entry.begin,
                                     entry.end - entry.begin))
                .second);
      }
    }
    uint64_t total = 0;
    for (const Piece& piece : pieces) {
      EXPECT_TRUE(seen.at(piece.name) == piece.array->bytes) << piece.name;
    }
    for (const auto& [name, bytes] : seen) total += bytes.size();
    const std::string text = ReadText(Path("out/") + std::string(kIndexName));
    auto index = ParseHfIndex(AsBytes(text));
    ASSERT_OK(index.status());
    EXPECT_EQ(index->total_size, total);
    EXPECT_EQ(index->weight_map.size(), seen.size());
  }
};

TEST_F(MergeJobTest, EveryDtypeByRowsAndColumns) {
  std::vector<Array> arrays(kDtypeCount);
  std::vector<Piece> pieces;
  for (int d = 0; d < kDtypeCount; ++d) {
    Array& array = arrays[static_cast<size_t>(d)];
    array = MakeArray(static_cast<Dtype>(d), {7, 40}, 1);
    const Dims parts = d % 2 == 0 ? Dims{3, 1} : Dims{1, 3};
    for (Piece& p :
         GridPieces(std::string("t.") + DtypeName(array.dtype), array, parts)) {
      pieces.push_back(std::move(p));
    }
  }
  Expect(pieces);
}

TEST_F(MergeJobTest, GridsScalarsEmptiesAndUneven) {
  const Array two = MakeArray(Dtype::kF32, {13, 17}, 1);
  const Array three = MakeArray(Dtype::kBF16, {5, 7, 11}, 2);
  const Array scalar = MakeArray(Dtype::kC64, {}, 3);
  const Array empty = MakeArray(Dtype::kI32, {4, 0}, 4);
  const Array whole = MakeArray(Dtype::kF4, {2, 3}, 6);
  std::vector<Piece> pieces = GridPieces("two", two, {4, 2});
  for (Piece& p : GridPieces("three", three, {2, 2, 2})) pieces.push_back(p);
  pieces.push_back(WholePiece("scalar", scalar, 1));
  pieces.push_back(WholePiece("empty", empty, 2));
  pieces.push_back(WholePiece("whole", whole, 3));
  Expect(pieces);
}

// Pieces of 8 MiB cut rows, columns and 3-byte elements.
TEST_F(MergeJobTest, LargeTensorsByColumns) {
  const Array wide = MakeArray(Dtype::kF32, {3000, 1000}, 1);    // 12 MB
  const Array six = MakeArray(Dtype::kF6E2M3, {3000, 4004}, 2);  // 9 MB
  std::vector<Piece> pieces = GridPieces("wide", wide, {1, 4});
  for (Piece& p : GridPieces("six", six, {1, 2})) pieces.push_back(p);
  for (const int ranks : {0, 1, 3, 7}) {
    MergeSettings settings;
    settings.ranks = ranks;
    settings.output.workers = 1 + ranks % 3;
    settings.output.direct_io = ranks % 2 == 0;
    std::filesystem::remove_all(Path("out"));
    Expect(pieces, settings);
  }
}

// Long runs are digested once for both files, whose segments they cut at
// different places; short ones lie between them.
TEST_F(MergeJobTest, LargeTensorsByRows) {
  const Array tall = MakeArray(Dtype::kF32, {2999, 1001}, 1);  // 12 MB
  const Array half = MakeArray(Dtype::kBF16, {1001, 1501}, 2);
  const Array tiny = MakeArray(Dtype::kU8, {5, 3}, 3);
  const Array wide = MakeArray(Dtype::kU8, {300, 4001}, 4);
  std::vector<Piece> pieces = GridPieces("b", tall, {3, 1});
  for (Piece& p : GridPieces("a", tiny, {3, 1})) pieces.push_back(p);
  for (Piece& p : GridPieces("c", half, {2, 1})) pieces.push_back(p);
  for (Piece& p : GridPieces("d", wide, {1, 3})) pieces.push_back(p);
  for (const bool cached : {false, true}) {
    MergeSettings settings;
    settings.ranks = cached ? 3 : 0;
    settings.output.direct_io = !cached;  // past the cache, or into it
    std::filesystem::remove_all(Path("out"));
    Expect(pieces, settings);
  }
}

// A source stride so long that one output piece spans more input than fits.
TEST_F(MergeJobTest, StripesLongerThanTheScratch) {
  const Array tall = MakeArray(Dtype::kU8, {1 << 12, 1 << 12}, 1);  // 16 MiB
  std::vector<Piece> pieces;
  // Rank 0 holds the columns of both ends as boxes of its files 1 and 2.
  pieces.push_back({0, "t", &tall, {{0, 0}, {1 << 12, 100}}});
  pieces.push_back({1, "t", &tall, {{0, 100}, {1 << 12, (1 << 12) - 300}}});
  pieces.push_back({0, "t", &tall, {{0, (1 << 12) - 200}, {1 << 12, 200}}});
  Expect(pieces);
}

TEST_F(MergeJobTest, MappingDividesTensorsOverFiles) {
  const Array a = MakeArray(Dtype::kF32, {8, 8}, 1);
  const Array b = MakeArray(Dtype::kF16, {8, 8}, 2);
  const Array c = MakeArray(Dtype::kI8, {8, 8}, 3);
  std::vector<Piece> pieces = GridPieces("a", a, {2, 1});
  for (Piece& p : GridPieces("b", b, {1, 2})) pieces.push_back(p);
  for (Piece& p : GridPieces("c", c, {2, 2})) pieces.push_back(p);
  MergeSettings settings;
  settings.mapping = {{"a", 1}, {"b", 3}, {"c", 1}};
  settings.ranks = 5;  // more than there are pieces
  Expect(pieces, settings);
  EXPECT_TRUE(std::filesystem::exists(Path("out/") + FinalFileName(1, 3)));
  EXPECT_TRUE(std::filesystem::exists(Path("out/") + FinalFileName(3, 3)));

  // Names that do not fit: an error, or left out.
  settings.mapping = {{"a", 1}, {"b", 2}};
  Status missing = Merge(Path("in"), Path("m"), settings).status();
  EXPECT_EQ(missing.kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(missing.tensor(), "c");
  settings.mapping = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 2}};
  Status unknown = Merge(Path("in"), Path("m"), settings).status();
  EXPECT_EQ(unknown.kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(unknown.tensor(), "d");
  EXPECT_FALSE(std::filesystem::exists(Path("m")));
  settings.mapping = {{"a", 1}, {"b", 0}, {"c", 1}};
  EXPECT_EQ(Merge(Path("in"), Path("m"), settings).status().kind(),
            ErrorKind::kInvalidArgument);
  settings.strict = false;
  settings.mapping = {{"a", 1}, {"b", 2}, {"d", 2}};
  ASSERT_OK(Merge(Path("in"), Path("m"), settings).status());
  auto all = ReadAll(Path("m"));
  ASSERT_OK(all.status());
  EXPECT_EQ(all->at("a"), a.bytes);
  EXPECT_EQ(all->at("b"), b.bytes);
  EXPECT_EQ(all->count("c"), 0u);
}

TEST_F(MergeJobTest, InPlaceKeepsTheShards) {
  const Array a = MakeArray(Dtype::kF32, {64, 64}, 1);
  SaveSettings save;
  save.object = "{\"step\": 3}";
  ASSERT_OK(SaveAll(Path("out"), GridPieces("a", a, {2, 2}), save).status());
  WriteText(Path("out/config.json"), "{}");
  for (int round = 0; round < 2; ++round) {  // the second reads the first's
    ASSERT_OK(Merge(Path("out"), Path("out")).status());
    auto all = ReadAll(Path("out"));
    ASSERT_OK(all.status());
    EXPECT_EQ(all->at("a"), a.bytes);
    EXPECT_EQ(all->at("step"), "{\"step\": 3}");
    for (int64_t rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(
          std::filesystem::exists(Path("out/") + ShardFileName(rank, 1, 1)));
    }
    EXPECT_EQ(ReadText(Path("out/config.json")), "{}");
  }
  // The next save removes all that was ours.
  ASSERT_OK(SaveAll(Path("out"), {WholePiece("b", a)}).status());
  EXPECT_EQ(Names(Path("out")), (std::vector<std::string>{
                                    "config.json", ShardFileName(0, 1, 1),
                                    "torch_ckpt.catalog", "torch_ckpt.json"}));
}

TEST_F(MergeJobTest, ForeignShardsMerge) {
  const Array a = MakeArray(Dtype::kF32, {10, 6}, 1);
  std::filesystem::create_directory(Path("in"));
  WriteForeign(Path("in/") + ShardFileName(0, 1, 1),
               {ForeignBox("a", a, {{0, 0}, {4, 6}})});
  WriteForeign(Path("in/") + ShardFileName(1, 1, 1),
               {ForeignBox("a", a, {{4, 0}, {6, 6}})});
  ASSERT_OK(Merge(Path("in"), Path("out")).status());
  EXPECT_EQ(ReadAll(Path("out"))->at("a"), a.bytes);
}

#ifdef TORCH_CKPT_FAULTS
// All that is read of a small shard: its header, in one call; when its data are
// wanted the first bytes again, in case it was replaced, and its one run.
TEST_F(MergeJobTest, HeadersAreReadOnce) {
  const Array a = MakeArray(Dtype::kF32, {10, 6}, 1);
  std::filesystem::create_directory(Path("in"));
  for (int64_t row = 0; row < 10; ++row) {
    WriteForeign(Path("in/") + ShardFileName(row, 1, 1),
                 {ForeignBox("a", a, {{row, 0}, {1, 6}})});
  }
  std::mutex mutex;
  std::map<std::string, int> opened, reads;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const std::lock_guard lock(mutex);
    const std::string op = site.op;
    if (site.path.find("shard-") == std::string::npos) return {};
    if (op == "openat") ++opened[site.path];
    if (op == "pread" || op == "preadv2") ++reads[site.path];
    return {};
  });
  const Status merged = Merge(Path("in"), Path("out")).status();
  SetFaultHook(nullptr);
  ASSERT_OK(merged);
  ASSERT_EQ(reads.size(), 10u);
  for (const auto& [path, count] : reads) EXPECT_EQ(count, 3) << path;
  for (const auto& [path, count] : opened) EXPECT_EQ(count, 2) << path;
}

// Before the first tensor of an input there is a header, which is no part of
// what is merged: no reason to read the segment that both are in once more.
TEST_F(MergeJobTest, WhatIsReadIsReadOnce) {
  const Array a = MakeArray(Dtype::kF32, {16, 1 << 17}, 1);  // 8 MiB
  ASSERT_OK(SaveAll(Path("in"), GridPieces("a", a, {16, 1})).status());
  std::atomic<uint64_t> bytes = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    const bool input = site.path.starts_with(Path("in/shard"));
    if (input && site.transfer) bytes += site.transfer->bytes;
    return {};
  });
  const Status merged = Merge(Path("in"), Path("out")).status();
  SetFaultHook(nullptr);
  ASSERT_OK(merged);
  EXPECT_GE(bytes, a.bytes.size());
  EXPECT_LE(bytes, a.bytes.size() + a.bytes.size() / 8);
}

// Nothing in such files says which save they are of: one that is written anew
// while it is read would make a mixture of two.
TEST_F(MergeJobTest, AForeignFileThatChangesMeanwhileIsAConflict) {
  const Array old = MakeArray(Dtype::kF32, {10, 6}, 1);
  const Array fresh = MakeArray(Dtype::kF32, {10, 6}, 2);
  std::filesystem::create_directory(Path("in"));
  const std::string file = Path("in/") + ShardFileName(0, 1, 1);
  const auto write = [&](const Array& a) {
    WriteForeign(file, {ForeignBox("a", a, {{0, 0}, {10, 6}})});
  };
  for (const bool merge : {false, true}) {
    write(old);
    // File times may be as coarse as this.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::atomic<int> opens = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      // Once for the header, and once for the data, which come next.
      if (site.op == std::string("openat") && site.path == file &&
          ++opens == 2) {
        write(fresh);
      }
      return {};
    });
    const Status status = merge ? Merge(Path("in"), Path("out")).status()
                                : ReadAll(Path("in")).status();
    SetFaultHook(nullptr);
    EXPECT_EQ(opens, 2);
    EXPECT_EQ(status.kind(), ErrorKind::kConflict) << status.ToString();
    EXPECT_EQ(status.file(), file);
    EXPECT_FALSE(std::filesystem::exists(Path("out")));
  }
}
#endif

TEST_F(MergeJobTest, DamagedInputLeavesNoOutput) {
  const Array a = MakeArray(Dtype::kF32, {512, 600}, 1);
  const std::string file = Path("in/") + ShardFileName(1, 1, 1);
  for (const Dims& parts : {Dims{1, 3}, Dims{3, 1}}) {
    ASSERT_OK(SaveAll(Path("in"), GridPieces("a", a, parts)).status());
    const std::string good = ReadText(file);
    for (const size_t at : {good.size() - 1, good.size() / 2, size_t{4096}}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      WriteText(file, bad);
      for (const int ranks : {0, 2}) {
        MergeSettings settings;
        settings.ranks = ranks;
        const Status status = Merge(Path("in"), Path("out"), settings).status();
        EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << at;
        EXPECT_NE(status.ToString().find("shard-00002"), std::string::npos);
        EXPECT_EQ(Names(root()), std::vector<std::string>{"in"});
      }
    }
  }
}

// Only their digests tell files without an id from those of another save.
TEST_F(MergeJobTest, ObjectsAreComparedEvenUnverified) {
  const Array a = MakeArray(Dtype::kF32, {8, 8}, 1);
  SaveSettings save;
  save.object = "{\"step\": 3}";
  ASSERT_OK(SaveAll(Path("in"), {WholePiece("a", a)}, save).status());
  MergeSettings unverified;
  unverified.verify = false;
  const auto flip_last = [](const std::string& path) {
    std::string text = ReadText(path);
    text.back() = static_cast<char>(text.back() ^ 1);
    WriteText(path, text);
  };
  flip_last(Path("in/") + ShardFileName(0, 1, 1));
  ASSERT_OK(Merge(Path("in"), Path("out"), unverified).status());
  flip_last(Path("in/") + ObjectFileName(0));
  const Status status = Merge(Path("in"), Path("out"), unverified).status();
  EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << status.ToString();
  EXPECT_TRUE(status.file().ends_with(ObjectFileName(0))) << status.file();
}

TEST_F(MergeJobTest, ProgressCountsTheBytesOfTheOutput) {
  const Array a = MakeArray(Dtype::kF32, {700, 3000}, 1);  // 8 MiB
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {3, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  auto plan = MergePlan::Make(*checkpoint, {}, {});
  ASSERT_OK(plan.status());
  auto session = BeginSave(Path("out"), true);
  ASSERT_OK(session.status());
  Job job;
  ASSERT_OK(
      RunMergeJob(*plan, session->directory(), plan->outputs(), &job).status());
  EXPECT_GT(job.total(), a.bytes.size());
  EXPECT_EQ(job.total(), plan->outputs()[0].file.bytes);
  EXPECT_EQ(job.done(), job.total());
}

TEST_F(MergeJobTest, CancelLeavesNoOutput) {
  const Array a = MakeArray(Dtype::kF32, {64, 64}, 1);
  ASSERT_OK(SaveAll(Path("in"), GridPieces("a", a, {2, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("in"));
  auto plan = MergePlan::Make(*checkpoint, {}, {});
  ASSERT_OK(plan.status());
  {
    auto session = BeginSave(Path("out"), true);
    ASSERT_OK(session.status());
    Job job;
    job.Cancel();
    EXPECT_EQ(RunMergeJob(*plan, session->directory(), plan->outputs(), &job)
                  .status()
                  .kind(),
              ErrorKind::kCancelled);
    EXPECT_EQ(Names(session->place().path), std::vector<std::string>());
  }
  EXPECT_EQ(Names(root()), std::vector<std::string>{"in"});
}

// Ranks whose plans differ must not write into each other's files.
TEST_F(MergeJobTest, IdsOfAnotherPlanAreRefused) {
  const Array a = MakeArray(Dtype::kF32, {8, 8}, 1);
  ASSERT_OK(SaveAll(Path("in"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("in"));
  EXPECT_EQ(
      MergePlan::Make(*checkpoint, {}, {NewId(), NewId()}).status().kind(),
      ErrorKind::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt
