// Tensors joined of boxes that are elsewhere: in memory, dense or not.
#include <gtest/gtest.h>

#include <random>

#include "engine/write/fill.h"
#include "engine/write/joined_boxes.h"
#include "engine/write/memory_providers.h"
#include "engine_test_util.h"
#include "memory_boxes.h"

namespace torch_ckpt {
namespace {

// All of the list, filled in parts of at most `most` bytes.
std::string Filled(const ExtentList& list, uint64_t most, uint64_t scratch) {
  std::string out(list.size(), '?');
  std::vector<std::byte> room(scratch);
  for (uint64_t at = 0; at < out.size(); at += most) {
    const uint64_t bytes = std::min<uint64_t>(most, out.size() - at);
    FillBuffer buffer({reinterpret_cast<std::byte*>(out.data()) + at, bytes},
                      at, 0, FillBuffer::Copies::kDigested);
    const auto asked = StretchesByProvider(list, at, bytes);
    EXPECT_OK(FillStretches(asked, room, &buffer));
  }
  return out;
}

TEST(JoinedBoxesTest, TensorsAreWhatTheirBoxesHave) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    std::deque<Array> arrays;
    MemoryBoxes memory;
    std::vector<JoinedBox> boxes;
    for (uint64_t t = 0; t < 3; ++t) {
      Dims shape, parts;
      for (int d = 0; d < 1 + static_cast<int>(random() % 3); ++d) {
        shape.push_back(1 + static_cast<int64_t>(random() % 60));
        parts.push_back(1 + static_cast<int64_t>(random() % 3));
      }
      const Array& array = arrays.emplace_back(
          MakeArray(random() % 2 ? Dtype::kF32 : Dtype::kI16, shape,
                    static_cast<uint32_t>(random())));
      for (const Piece& piece : GridPieces("w", array, parts)) {
        if (piece.box.Empty()) continue;
        auto bytes = ByteBox::Make(array.dtype, shape, piece.box);
        ASSERT_OK(bytes.status());
        boxes.push_back({t, *bytes, {nullptr, memory.sources.size()}});
        memory.Add(array, piece.box, random() % 2);
      }
    }
    HostMemory host(memory.sources);
    for (JoinedBox& box : boxes) box.origin.provider = &host;
    JoinedBoxes joined(std::move(boxes));
    ExtentList list;
    std::string expected;
    for (uint64_t t = 0; t < arrays.size(); ++t) {
      list.Append({&joined, t}, arrays[t].bytes.size());
      expected += arrays[t].bytes;
    }
    const uint64_t most = 1 + random() % (2 * expected.size());
    EXPECT_EQ(Filled(list, most, joined.ScratchBytes()), expected) << round;
  }
}

// Larger than a step.
TEST(JoinedBoxesTest, ALargeTensorOfColumns) {
  const Array array = MakeArray(Dtype::kF32, {1000, 700}, 1);
  MemoryBoxes memory;
  std::vector<JoinedBox> boxes;
  for (const Piece& piece : GridPieces("w", array, {1, 7})) {
    auto bytes = ByteBox::Make(array.dtype, array.shape, piece.box);
    ASSERT_OK(bytes.status());
    boxes.push_back({0, *bytes, {nullptr, memory.sources.size()}});
    memory.Add(array, piece.box, boxes.size() % 2);
  }
  HostMemory host(memory.sources);
  for (JoinedBox& box : boxes) box.origin.provider = &host;
  JoinedBoxes joined(std::move(boxes));
  ExtentList list;
  list.Append({&joined, 0}, array.bytes.size());
  EXPECT_EQ(Filled(list, kPieceBytes, joined.ScratchBytes()), array.bytes);
}

// What its boxes leave out is noticed by who asked.
TEST(JoinedBoxesTest, AHoleIsAnError) {
  const Array array = MakeArray(Dtype::kF32, {8, 8}, 1);
  MemoryBoxes memory;
  const Box half{{0, 0}, {8, 4}};
  memory.Add(array, half, true);
  HostMemory host(memory.sources);
  auto bytes = ByteBox::Make(array.dtype, array.shape, half);
  ASSERT_OK(bytes.status());
  JoinedBoxes joined({{0, *bytes, {&host, 0}}});
  ExtentList list;
  list.Append({&joined, 0}, array.bytes.size());
  std::vector<std::byte> out(array.bytes.size()), room(joined.ScratchBytes());
  FillBuffer buffer(out, 0, 0, FillBuffer::Copies::kCached);
  const Status status =
      FillStretches(StretchesByProvider(list, 0, out.size()), room, &buffer);
  EXPECT_EQ(status.kind(), ErrorKind::kInternal) << status.ToString();
}

}  // namespace
}  // namespace torch_ckpt
