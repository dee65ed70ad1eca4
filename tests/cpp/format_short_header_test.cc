// The short form of a header.
#include <gtest/gtest.h>

#include "format/binary.h"
#include "format/safetensors/short_header.h"

namespace torch_ckpt {
namespace {

constexpr uint32_t kTextCrc = 0x89abcdef;

// Tensors: a whole one, a part, a scalar, a packed one, an empty part of
// something.
FileHeader Sample() {
  FileHeader file;
  file.header.tensors = {{"a", Dtype::kBF16, {2, 3}, 0, 12},
                         {"b.c", Dtype::kF32, {1, 4}, 12, 28},
                         {"s", Dtype::kI64, {}, 28, 36},
                         {"p", Dtype::kI16, {3}, 36, 42},
                         {"e", Dtype::kU8, {0, 5}, 42, 42}};
  file.header.data_begin = 4096;
  file.header.file_bytes = 4096 + 42;
  file.sharding.file_id = std::string(32, 'c');
  file.sharding.has_sharding_info = true;
  file.sharding.entries = {
      {{0, 0}, Dims{2, 3}},
      {{3, 0}, Dims{4, 4}},
      {{}, Dims{}},
      {{0}, Dims{4, 2}, {{{0, 0}, {1, 2}}, {{3, 1}, {1, 1}}}},
      {{7, 0}, Dims{7, 5}}};
  return file;
}

std::string Encoded() { return EncodeShortHeader(Sample(), kTextCrc); }

TEST(ShortHeader, SaysWhatTheHeaderSays) {
  const std::string bytes = Encoded();
  const auto decoded = DecodeShortHeader(AsBytes(bytes));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->text_crc32c, kTextCrc);
  const FileHeader expected = Sample();
  const FileHeader& file = decoded->file;
  EXPECT_EQ(file.header.data_begin, expected.header.data_begin);
  EXPECT_EQ(file.header.file_bytes, expected.header.file_bytes);
  EXPECT_EQ(file.sharding.file_id, expected.sharding.file_id);
  EXPECT_TRUE(file.sharding.has_sharding_info);
  ASSERT_EQ(file.header.tensors.size(), expected.header.tensors.size());
  ASSERT_EQ(file.sharding.entries.size(), expected.header.tensors.size());
  for (size_t i = 0; i < expected.header.tensors.size(); ++i) {
    EXPECT_EQ(file.header.tensors[i].name, expected.header.tensors[i].name);
    EXPECT_EQ(file.header.tensors[i].dtype, expected.header.tensors[i].dtype);
    EXPECT_EQ(file.header.tensors[i].shape, expected.header.tensors[i].shape);
    EXPECT_EQ(file.header.tensors[i].begin, expected.header.tensors[i].begin);
    EXPECT_EQ(file.header.tensors[i].end, expected.header.tensors[i].end);
    EXPECT_EQ(file.sharding.entries[i].offsets,
              expected.sharding.entries[i].offsets);
    EXPECT_EQ(file.sharding.entries[i].global_shape,
              expected.sharding.entries[i].global_shape);
    EXPECT_EQ(file.sharding.entries[i].packed,
              expected.sharding.entries[i].packed);
  }
}

TEST(ShortHeader, EveryCutAndEveryBitIsSeen) {
  const std::string bytes = Encoded();
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(DecodeShortHeader(AsBytes(bytes.substr(0, i))).ok());
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = bytes;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      EXPECT_FALSE(DecodeShortHeader(AsBytes(bad)).ok()) << i;
    }
  }
  // The same with a right checksum: never a crash, and one spelling.
  const std::string body = bytes.substr(0, bytes.size() - 4);
  for (size_t i = 0; i <= body.size(); ++i) {
    std::string cut = body.substr(0, i);
    PutCrc(&cut);
    EXPECT_EQ(DecodeShortHeader(AsBytes(cut)).ok(), i == body.size());
    for (int value : {0, 1, 0x7f, 0x80, 0xff}) {
      if (i == body.size()) break;
      std::string bad = body;
      bad[i] = static_cast<char>(value);
      PutCrc(&bad);
      const auto decoded = DecodeShortHeader(AsBytes(bad));
      if (!decoded.ok()) continue;
      EXPECT_EQ(EncodeShortHeader(decoded->file, decoded->text_crc32c), bad);
    }
  }
  std::string longer = body + '\0';
  PutCrc(&longer);
  EXPECT_FALSE(DecodeShortHeader(AsBytes(longer)).ok());
}

TEST(ShortHeader, RefusesWhatAHeaderCannotSay) {
  const auto refused = [](auto&& change) {
    FileHeader file = Sample();
    change(&file);
    const std::string bytes = EncodeShortHeader(file, kTextCrc);
    EXPECT_EQ(DecodeShortHeader(AsBytes(bytes)).status().kind(),
              ErrorKind::kCorrupt);
  };
  refused([](FileHeader* f) { f->header.file_bytes += 1; });
  refused([](FileHeader* f) { f->header.data_begin = 1 << 20; });
  refused([](FileHeader* f) { f->sharding.file_id = "short"; });
  refused([](FileHeader* f) { f->header.tensors[0].name = "\xff"; });
  refused([](FileHeader* f) { f->sharding.has_sharding_info = false; });
  refused([](FileHeader* f) { f->sharding.entries[1].offsets = {4, 0}; });
  refused([](FileHeader* f) { f->sharding.entries[0].offsets = {1, 0}; });
  refused([](FileHeader* f) { f->sharding.entries[3].packed.pop_back(); });
  refused(
      [](FileHeader* f) { f->sharding.entries[3].packed[0].offsets = {4, 0}; });
  refused([](FileHeader* f) { f->header.tensors[3].shape = {1, 3}; });
  refused([](FileHeader* f) {  // boxes without dimensions take no bytes to say
    f->sharding.entries[3].global_shape = Dims{};
    f->sharding.entries[3].packed.assign(3, Box());
  });
  refused([](FileHeader* f) {  // 2^96 elements
    f->header.tensors[0].shape = {int64_t{1} << 48, int64_t{1} << 48};
    f->sharding.entries[0].global_shape = f->header.tensors[0].shape;
  });
  refused([](FileHeader* f) {
    f->sharding.entries[1].global_shape = {int64_t{1} << 47, int64_t{1} << 47};
  });
}

TEST(ShortHeader, WithoutShardsAllIsWhole) {
  FileHeader file = Sample();
  file.sharding.has_sharding_info = false;
  file.sharding.entries.clear();
  const auto decoded =
      DecodeShortHeader(AsBytes(EncodeShortHeader(file, kTextCrc)));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->file.header.tensors.size(), file.header.tensors.size());
  EXPECT_TRUE(decoded->file.sharding.entries.empty());
  EXPECT_FALSE(decoded->file.sharding.has_sharding_info);
}

}  // namespace
}  // namespace torch_ckpt
