// What the engine's tests share: arrays with known bytes, saves by simulated
// ranks, and reading back. The oracle copies element by element and shares no
// code with csrc/plan.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/commit/commit.h"
#include "engine/merge/merge_job.h"
#include "engine/open/checkpoint.h"
#include "engine/read/read_job.h"
#include "engine/save/write_job.h"
#include "format/names.h"
#include "names_test_util.h"
#include "os/fault.h"
#include "sanitizers.h"

namespace torch_ckpt {

// A whole tensor in memory, row-major.
struct Array {
  Dtype dtype = Dtype::kU8;
  Dims shape;
  std::string bytes;
};

Array MakeArray(Dtype dtype, Dims shape, uint32_t seed);

std::string RandomBytes(size_t size, uint32_t seed);

// Bytes of a box, unit by unit.
std::string BoxBytes(const Array& array, const Box& box);

// One inside `shape`, cut at multiples of `last_unit` in the last dimension.
Box RandomBox(const Dims& shape, int64_t last_unit, std::mt19937* random);

// A box of a tensor that a simulated rank holds.
struct Piece {
  int64_t rank = 0;
  std::string name;
  const Array* array = nullptr;
  Box box;
};

Piece WholePiece(std::string name, const Array& array, int64_t rank = 0);

// The boxes of a grid with `parts` cuts per dimension, sized as torch.chunk
// does (the last ones may be short or empty); one rank each.
std::vector<Piece> GridPieces(const std::string& name, const Array& array,
                              const Dims& parts);

struct SaveSettings {
  bool index = false;
  int64_t world_size = 1;
  OutputOptions output;
  std::string object;  // content of rank 0's objects file, when not empty
  std::string below;   // "a/b/": the files lie there
};

// The plan and memory of one rank.
struct RankWork {
  std::vector<std::string> memory;
  std::vector<SourceTensor> sources;
  WritePlan plan;
};

SourceTensor BytesSource(const std::string& bytes);

// Box k of a tensor on one rank goes to that rank's file k.
void PlanRank(int64_t rank, const std::vector<Piece>& pieces,
              const SaveSettings& settings, RankWork* work);

Status WriteRanks(const std::string& staging, const std::vector<Piece>& pieces,
                  const SaveSettings& settings, CommitRequest* request);

Result<Manifest> SaveAll(const std::string& target,
                         const std::vector<Piece>& pieces,
                         const SaveSettings& settings = {});

using CheckpointPtr = std::shared_ptr<const Checkpoint>;

Result<std::string> ReadBox(const CheckpointPtr& checkpoint,
                            const std::string& name, const Box& box,
                            bool verify = true, int workers = 2);

// Every tensor of a directory, whole.
Result<std::map<std::string, std::string>> ReadAll(const std::string& path,
                                                   bool verify = true);

struct MergeSettings {
  std::vector<std::pair<std::string, int64_t>> mapping;
  bool strict = true;
  bool verify = true;
  OutputOptions output;
  int ranks = 0;  // 0: one process; else bytes divided over so many
};

Result<Manifest> Merge(const std::string& from, const std::string& to,
                       const MergeSettings& settings = {});

// A safetensors file as others write it: no id, no global shapes. `offsets` of
// nullopt everywhere gives a plain file, else DCP_SHARDING_INFO as stock.
struct ForeignTensor {
  std::string name;
  Dtype dtype;
  Dims shape;
  std::string bytes;
  std::optional<Dims> offsets;
};

void WriteForeign(const std::string& path,
                  const std::vector<ForeignTensor>& tensors);

ForeignTensor ForeignBox(const std::string& name, const Array& array,
                         const Box& box);

void WriteText(const std::string& path, const std::string& text);

std::string ReadText(const std::string& path);

std::vector<std::string> Names(const std::string& path);

// A directory for one test, in memory where there is one: fsync costs nothing
// there, and what survives a crash is modelled, not tried.
class EngineTest : public ::testing::Test {
 protected:
  explicit EngineTest(bool on_disk = false) : on_disk_(on_disk) {}
  void SetUp() override {
    std::error_code ignored;
    std::filesystem::path base = "/dev/shm";
    if (on_disk_ || !std::filesystem::is_directory(base, ignored)) {
      base = std::filesystem::temp_directory_path();
    }
    std::string name = (base / "torch_ckpt-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override {
#ifdef TORCH_CKPT_FAULTS
    SetFaultHook(nullptr);
#endif
    std::error_code ignored;  // a leftover in the temporary directory
    std::filesystem::remove_all(root_, ignored);
  }
  const std::string& root() const { return root_; }
  std::string Path(const std::string& name) const { return root_ + "/" + name; }

 private:
  const bool on_disk_;
  std::string root_;
};

// The same on disk, where there is a page cache to ask and direct I/O.
class EngineDiskTest : public EngineTest {
 protected:
  EngineDiskTest() : EngineTest(/*on_disk=*/true) {}
};

#define ASSERT_OK(expr)                                    \
  do {                                                     \
    const ::torch_ckpt::Status ok_status_ = (expr);        \
    ASSERT_TRUE(ok_status_.ok()) << ok_status_.ToString(); \
  } while (0)

#define EXPECT_OK(expr)                                    \
  do {                                                     \
    const ::torch_ckpt::Status ok_status_ = (expr);        \
    EXPECT_TRUE(ok_status_.ok()) << ok_status_.ToString(); \
  } while (0)

}  // namespace torch_ckpt
