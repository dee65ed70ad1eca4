// Boxes of a checkpoint into memory of another dtype.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "engine/read/read_job.h"
#include "engine_test_util.h"
#include "plan/runs.h"
#include "values/cast.h"

namespace torch_ckpt {
namespace {

using ReadCastsTest = EngineDiskTest;

// Numbers below 2, which every float type of more than 8 bits rounds.
Array SmallFloats(const Dims& shape, uint32_t seed) {
  Array array = MakeArray(Dtype::kF32, shape, seed);
  for (size_t i = 3; i < array.bytes.size(); i += 4) {
    array.bytes[i] = static_cast<char>(array.bytes[i] & ~0x40);
  }
  return array;
}

Status ReadCast(const CheckpointPtr& checkpoint, const Box& box, Dtype to,
                int workers, std::string* out) {
  const auto bytes = static_cast<int64_t>(DtypeBits(to)) / 8;
  out->assign(static_cast<size_t>(box.Volume() * bytes), '\x5a');
  ReadPlan plan;
  plan.workers = workers;
  plan.items.push_back({"a", box, {}, 0});
  const TargetTensor target{reinterpret_cast<std::byte*>(out->data()),
                            box.sizes, DenseStrides(box.sizes, bytes), bytes,
                            to};
  Job job;
  TC_RETURN_IF_ERROR(RunReadJob(checkpoint, plan, {target}, &job).status());
  return job.done() == job.total() ? Status() : Internal("not all is done");
}

std::string Cast(const std::string& floats, Dtype to) {
  const size_t count = floats.size() / 4;
  std::string out(count * static_cast<size_t>(DtypeBits(to)) / 8, '\0');
  CastElements(Dtype::kF32, reinterpret_cast<const std::byte*>(floats.data()),
               to, reinterpret_cast<std::byte*>(out.data()), count);
  return out;
}

// One byte before it: every bound of a step or cell cuts an element.
void WriteOdd(const std::string& path, const Array& a) {
  std::filesystem::create_directory(path);
  WriteForeign(
      path + "/model.safetensors",
      {{"0", Dtype::kU8, {1}, "x", {}}, {"a", a.dtype, a.shape, a.bytes, {}}});
}

TEST_F(ReadCastsTest, TargetsOfAnotherDtype) {
  const Array a = SmallFloats({1000, 3001}, 1);  // 11 MiB
  ASSERT_OK(SaveAll(Path("long"), GridPieces("a", a, {2, 2})).status());
  ASSERT_OK(SaveAll(Path("short"), GridPieces("a", a, {2, 40})).status());
  WriteOdd(Path("odd"), a);
  std::mt19937 random(4);
  for (const char* name : {"long", "short", "odd"}) {
    auto checkpoint = OpenCheckpoint(Path(name));
    ASSERT_OK(checkpoint.status());
    std::vector<Box> boxes = {Box::Whole(a.shape), {{7, 9}, {990, 3}}};
    for (int i = 0; i < 6; ++i) boxes.push_back(RandomBox(a.shape, 1, &random));
    for (const Box& box : boxes) {
      const std::string stored = BoxBytes(a, box);
      for (const Dtype to : {Dtype::kBF16, Dtype::kF64, Dtype::kF32}) {
        std::string out;
        ASSERT_OK(ReadCast(*checkpoint, box, to, 3, &out));
        EXPECT_TRUE(out == (to == a.dtype ? stored : Cast(stored, to)))
            << name << " " << box.ToString() << " " << DtypeName(to);
      }
    }
  }
}

TEST_F(ReadCastsTest, StridedTargetsOfAnotherDtype) {
  const Array a = SmallFloats({6, 50, 90}, 1);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {3, 1, 2})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  const std::string wanted = Cast(a.bytes, Dtype::kBF16);
  // Element [i, j, k] stands at k * 400 + j * 8 + i, of two bytes.
  const Dims strides = {2, 16, 800};
  std::string memory(size_t{90} * 800, '\x5a');
  ReadPlan plan;
  plan.items.push_back({"a", Box::Whole(a.shape), {}, 0});
  Job job;
  ASSERT_OK(RunReadJob(*checkpoint, plan,
                       {{reinterpret_cast<std::byte*>(memory.data()), a.shape,
                         strides, 2, Dtype::kBF16}},
                       &job)
                .status());
  size_t at = 0;
  for (int i = 0; i < 6; ++i) {
    for (int j = 0; j < 50; ++j) {
      for (int k = 0; k < 90; ++k, at += 2) {
        const auto place = static_cast<size_t>(2 * i + 16 * j + 800 * k);
        ASSERT_EQ(memory.substr(place, 2), wanted.substr(at, 2));
      }
    }
  }
  EXPECT_EQ(memory.substr(12, 4), std::string(4, '\x5a'));  // between them
}

// As on a network file system: what was delivered before counts no more.
TEST_F(ReadCastsTest, CastsOfBytesThatAreReadAgain) {
  const Array a = SmallFloats({3 << 18}, 1);  // 3 MiB
  WriteOdd(Path("odd"), a);
  auto checkpoint = OpenCheckpoint(Path("odd"));
  ASSERT_OK(checkpoint.status());
  for (int stale = 1; stale < 6; ++stale) {
    std::atomic<int> reads = 0;
    SetFaultHook([&](const FaultSite& site) -> FaultAction {
      if (site.op == std::string("fstatfs")) return {.sys_errno = EIO};
      const bool fails = site.op == std::string("preadv2") && ++reads == stale;
      return {.sys_errno = fails ? ESTALE : 0};
    });
    std::string out;
    ASSERT_OK(
        ReadCast(*checkpoint, Box::Whole(a.shape), Dtype::kBF16, 1, &out));
    SetFaultHook(nullptr);
    EXPECT_GT(reads, stale);
    EXPECT_TRUE(out == Cast(a.bytes, Dtype::kBF16)) << stale;
  }
}

TEST_F(ReadCastsTest, ValuesThatWereNotThereAreNotLost) {
  Array a = SmallFloats({1000}, 1);
  const float half = 0.5;
  std::memcpy(a.bytes.data() + 3996, &half, sizeof half);
  ASSERT_OK(SaveAll(Path("c"), {WholePiece("a", a)}).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  std::string data;
  for (const std::string& name : Names(Path("c"))) {
    if (name.ends_with(".safetensors")) data = Path("c") + "/" + name;
  }
  const auto flip = [&] {  // 0.5 becomes 1.7e38, and back
    std::fstream file(data, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int byte = file.get();
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(byte ^ 0x40));
  };
  flip();
  std::string out;
  EXPECT_EQ(
      ReadCast(*checkpoint, Box::Whole(a.shape), Dtype::kF16, 1, &out).kind(),
      ErrorKind::kCorrupt);
  int opens = 0;
  SetFaultHook([&](const FaultSite& site) -> FaultAction {
    if (site.op == std::string("fstatfs")) return {.sys_errno = EIO};
    if (site.op == std::string("openat") && site.path == data && ++opens == 2) {
      flip();
    }
    return {};
  });
  checkpoint = OpenCheckpoint(Path("c"));  // as one that others write to
  ASSERT_OK(checkpoint.status());
  EXPECT_OK(ReadCast(*checkpoint, Box::Whole(a.shape), Dtype::kF16, 1, &out));
  SetFaultHook(nullptr);
  EXPECT_GE(opens, 2);
  EXPECT_TRUE(out == Cast(a.bytes, Dtype::kF16));
}

TEST_F(ReadCastsTest, CastsThatLoseValuesAndTargetsThatDoNotFit) {
  Array a = SmallFloats({3, 50}, 1);
  const float large = 70000;
  std::memcpy(a.bytes.data() + 4 * 120, &large, sizeof large);
  ASSERT_OK(SaveAll(Path("c"), GridPieces("a", a, {3, 1})).status());
  auto checkpoint = OpenCheckpoint(Path("c"));
  ASSERT_OK(checkpoint.status());
  std::string out;
  const Status lost =
      ReadCast(*checkpoint, Box::Whole(a.shape), Dtype::kF16, 2, &out);
  EXPECT_EQ(lost.kind(), ErrorKind::kInvalidArgument);
  EXPECT_NE(lost.ToString().find("'a'"), std::string::npos) << lost.ToString();
  EXPECT_NE(lost.ToString().find("at least 1 values of F32"), std::string::npos)
      << lost.ToString();
  EXPECT_OK(ReadCast(*checkpoint, {{0, 0}, {2, 50}}, Dtype::kF16, 2, &out));
  EXPECT_EQ(
      ReadCast(*checkpoint, {{0, 0}, {2, 50}}, Dtype::kI32, 2, &out).kind(),
      ErrorKind::kUnsupported);

  std::string memory(600, '\x5a');
  ReadPlan plan;
  plan.items.push_back({"a", Box::Whole(a.shape), {}, 0});
  Job job;
  // Of more bytes than its elements have.
  EXPECT_EQ(RunReadJob(*checkpoint, plan,
                       {{reinterpret_cast<std::byte*>(memory.data()), a.shape,
                         DenseStrides(a.shape, 2), 2, Dtype::kF64}},
                       &job)
                .status()
                .kind(),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(memory, std::string(600, '\x5a'));
}

}  // namespace
}  // namespace torch_ckpt
