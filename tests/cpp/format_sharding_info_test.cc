#include <gtest/gtest.h>

#include "format/safetensors/sharding_info.h"

namespace torch_ckpt {
namespace {

const std::string kId(32, 'b');

// Tensors a (2, 3), b scalar, c (0, 4).
SafetensorsHeader Header(
    std::vector<std::pair<std::string, std::string>> metadata) {
  SafetensorsHeader header;
  header.metadata = std::move(metadata);
  header.tensors = {{"a", Dtype::kF32, {2, 3}, 0, 24},
                    {"b", Dtype::kF32, {}, 24, 28},
                    {"c", Dtype::kF32, {0, 4}, 28, 28}};
  return header;
}
Result<ShardingInfo> ParseInfo(std::string info) {
  return ParseShardingInfo(Header({{"DCP_SHARDING_INFO", std::move(info)}}));
}
Result<ShardingInfo> ParseBoth(std::string info, std::string shapes) {
  return ParseShardingInfo(
      Header({{"DCP_SHARDING_INFO", std::move(info)},
              {"torch_ckpt.global_shapes", std::move(shapes)}}));
}

TEST(ShardingInfo, PlainFileHoldsWholeTensors) {
  const auto info = ParseShardingInfo(Header({{"format", "pt"}}));
  ASSERT_TRUE(info.ok());
  EXPECT_FALSE(info->has_sharding_info);
  EXPECT_EQ(info->file_id, "");
  EXPECT_TRUE(info->entries.empty());
  EXPECT_EQ(info->Find(0), nullptr);
}

TEST(ShardingInfo, StockText) {
  const auto info = ParseInfo(
      "{\"c\": {\"saved_offsets\": [8, 0]}, \"a\": {\"saved_offsets\": [4, "
      "0]}, \"b\": {\"saved_offsets\": []}}");
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_TRUE(info->has_sharding_info);
  EXPECT_EQ(info->entries[0].offsets, (Dims{4, 0}));
  EXPECT_EQ(info->entries[1].offsets, Dims());
  EXPECT_EQ(info->entries[2].offsets, (Dims{8, 0}));
  EXPECT_EQ(info->entries[0].global_shape, std::nullopt);
}

TEST(ShardingInfo, TensorsWithoutAnEntryAreAtZero) {
  const auto info = ParseInfo("{\"a\":{\"saved_offsets\":[4,0]}}");
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->entries[2].offsets, (Dims{0, 0}));
  EXPECT_EQ(info->Find(2), &info->entries[2]);
  EXPECT_TRUE(ParseInfo("{}").ok());
}

TEST(ShardingInfo, GlobalShapes) {
  const std::string offsets =
      "{\"a\":{\"saved_offsets\":[4,0]},\"c\":{\"saved_offsets\":[8,0]}}";
  const auto info = ParseBoth(offsets, "{\"a\":[6,3],\"c\":[8,4]}");
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->entries[0].global_shape, (Dims{6, 3}));
  EXPECT_EQ(info->entries[1].global_shape, Dims());
  EXPECT_EQ(info->entries[2].global_shape, (Dims{8, 4}));
  EXPECT_FALSE(ParseBoth(offsets, "{\"a\":[5,3],\"c\":[8,4]}").ok());
  EXPECT_FALSE(ParseBoth(offsets, "{\"a\":[6,2],\"c\":[8,4]}").ok());
  EXPECT_FALSE(ParseBoth(offsets, "{\"a\":[6],\"c\":[8,4]}").ok());
  EXPECT_FALSE(ParseBoth(offsets, "{\"a\":[6,3],\"c\":[7,4]}").ok());
  // Left out means whole, and then the offsets must be 0.
  const auto missing = ParseBoth(offsets, "{\"a\":[6,3]}");
  EXPECT_EQ(missing.status().kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(missing.status().tensor(), "c");
}

TEST(ShardingInfo, RefusesBadOffsets) {
  for (const char* text : {
           "",
           "null",
           "[]",
           "{\"a\":null}",
           "{\"a\":[4,0]}",
           "{\"a\":{}}",
           "{\"a\":{\"saved_offsets\":null}}",
           "{\"a\":{\"saved_offsets\":4}}",
           "{\"a\":{\"saved_offsets\":\"4,0\"}}",
           "{\"a\":{\"saved_offsets\":{}}}",
           "{\"a\":{\"saved_offsets\":[[4,0]]}}",
           "{\"a\":{\"saved_offsets\":[4]}}",
           "{\"a\":{\"saved_offsets\":[4,0,0]}}",
           "{\"a\":{\"saved_offsets\":[1,2,3,4,5,6,7,8,9]}}",
           "{\"a\":{\"saved_offsets\":[-4,0]}}",
           "{\"a\":{\"saved_offsets\":[-0,0]}}",
           "{\"a\":{\"saved_offsets\":[4.0,0]}}",
           "{\"a\":{\"saved_offsets\":[true,0]}}",
           "{\"a\":{\"saved_offsets\":[\"4\",0]}}",
           "{\"a\":{\"saved_offsets\":[281474976710656,0]}}",
           "{\"a\":{\"saved_offsets\":[18446744073709551616,0]}}",
           "{\"b\":{\"saved_offsets\":[0]}}",
           "{\"z\":{\"saved_offsets\":[0]}}",
           "{\"a\":{\"saved_offsets\":[4,0]},\"a\":{\"saved_offsets\":[4,0]}}",
           "{\"a\":{\"saved_offsets\":[4,0],\"saved_offsets\":[4,0]}}",
           "{\"a\":{\"saved_offsets\":[4,0]}} x",
       })
    EXPECT_EQ(ParseInfo(text).status().kind(), ErrorKind::kCorrupt) << text;
  EXPECT_EQ(
      ParseInfo("{\"a\":{\"saved_offsets\":[4,0],\"x\":1}}").status().kind(),
      ErrorKind::kUnsupported);
}

TEST(ShardingInfo, RefusesBadGlobalShapes) {
  for (const char* text :
       {"", "[]", "{\"a\":null}", "{\"a\":{}}", "{\"a\":6}", "{\"a\":[[6,3]]}",
        "{\"a\":[-6,3]}", "{\"a\":[6.0,3]}", "{\"z\":[1]}", "{\"b\":[1]}",
        "{\"a\":[281474976710655,281474976710655]}"})
    EXPECT_EQ(ParseBoth("{}", text).status().kind(), ErrorKind::kCorrupt)
        << text;
  EXPECT_FALSE(
      ParseShardingInfo(Header({{"torch_ckpt.file_id", "short"}})).ok());
}

TEST(ShardingInfo, BuildAndParse) {
  const std::vector<ShardEntry> shards = {
      {{4, 0}, Dims{6, 3}}, {{}, {}}, {{8, 0}, Dims{8, 4}}};
  const std::vector<SafetensorsEntry> tensors = Header({}).tensors;
  const auto metadata = BuildFileMetadata(kId, tensors, &shards);
  ASSERT_EQ(metadata.size(), 5u);
  EXPECT_EQ(metadata[0].first, kFileIdKey);
  EXPECT_EQ(metadata[1], (std::pair<std::string, std::string>("format", "pt")));
  EXPECT_EQ(metadata[2].second, "1.0");
  EXPECT_EQ(metadata[3].second,
            "{\"a\":{\"saved_offsets\":[4,0]},\"b\":{\"saved_offsets\":[]},"
            "\"c\":{\"saved_offsets\":[8,0]}}");
  EXPECT_EQ(metadata[4].second, "{\"a\":[6,3],\"c\":[8,4]}");
  const auto info = ParseShardingInfo(Header(metadata));
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->file_id, kId);
  for (size_t i = 0; i < shards.size(); ++i) {
    EXPECT_EQ(info->entries[i].offsets, shards[i].offsets);
  }
  EXPECT_EQ(info->entries[0].global_shape, (Dims{6, 3}));
  EXPECT_EQ(info->entries[1].global_shape, Dims());

  const auto final_file = BuildFileMetadata(kId, tensors, nullptr);
  ASSERT_EQ(final_file.size(), 2u);
  EXPECT_FALSE(ParseShardingInfo(Header(final_file))->has_sharding_info);
}

// What a packed tensor "p" of 6 elements says, and its global shape.
Result<ShardingInfo> ParsePacked(const std::string& boxes,
                                 const std::string& shapes = "[4,5]",
                                 Dims in_file = {6}) {
  SafetensorsHeader header =
      Header({{"DCP_SHARDING_INFO", "{\"a\":{\"saved_offsets\":[0,0]}}"},
              {"torch_ckpt.global_shapes", "{\"p\":" + shapes + "}"},
              {"torch_ckpt.packed_boxes", "{\"p\":" + boxes + "}"}});
  header.tensors.push_back({"p", Dtype::kI16, in_file, 28, 40});
  return ParseShardingInfo(header);
}

TEST(ShardingInfo, PackedBoxes) {
  const auto info = ParsePacked("[[0,1,2,2],[3,0,1,2]]");
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  const ShardEntry& entry = info->entries[3];
  EXPECT_EQ(entry.packed,
            (std::vector<Box>{{{0, 1}, {2, 2}}, {{3, 0}, {1, 2}}}));
  EXPECT_EQ(entry.global_shape, (Dims{4, 5}));
  EXPECT_EQ(entry.offsets, (Dims{0}));
  EXPECT_TRUE(info->entries[0].packed.empty());

  std::vector<SafetensorsEntry> tensors = Header({}).tensors;
  tensors.push_back({"p", Dtype::kI16, {6}, 28, 40});
  const std::vector<ShardEntry> shards = {
      {{0, 0}, Dims{2, 3}}, {{}, Dims{}}, {{0, 0}, Dims{0, 4}}, entry};
  SafetensorsHeader header;
  header.metadata = BuildFileMetadata(kId, tensors, &shards);
  header.tensors = tensors;
  ASSERT_EQ(header.metadata.size(), 6u);
  EXPECT_EQ(header.metadata[3].second.find("\"p\""), std::string::npos);
  EXPECT_EQ(header.metadata[5].second, "{\"p\":[[0,1,2,2],[3,0,1,2]]}");
  const auto again = ParseShardingInfo(header);
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(again->entries[3].packed, entry.packed);
  EXPECT_EQ(again->entries[3].global_shape, entry.global_shape);
}

TEST(ShardingInfo, RefusesBadPackedBoxes) {
  for (const char* boxes :
       {"", "[]", "[[]]", "{}", "6", "[6]", "[[0,1,2,2],3]", "[[[0,1,2,2]]]",
        "[[0,1,2,2]]",              // four elements of six
        "[[0,1,2,2],[3,0,1,3]]",    // seven
        "[[0,1,2,2],[3,0,1]]",      // an odd number
        "[[0,1,2,2],[3,2]]",        // another number of dimensions
        "[[0,1,2,2],[3,4,1,2]]",    // outside
        "[[0,1,2,3],[3,0,0,3]]",    // one of nothing
        "[[0,1,2,2],[3,0,-1,-2]]",  // no sizes
        "[[0,1,2,2],[281474976710656,0,1,2]]",
        "[[0,0,0,0,0,0,0,0,0,1,1,1,1,1,1,1,1,6]]"}) {
    EXPECT_EQ(ParsePacked(boxes).status().kind(), ErrorKind::kCorrupt) << boxes;
  }
  const char* const boxes = "[[0,1,2,2],[3,0,1,2]]";
  std::string many = "[[0,0,1,1]";
  for (int i = 0; i < 12; ++i) many += ",[0,0,1,1]";
  const Status too_many = ParsePacked(many + "]").status();
  EXPECT_NE(too_many.message().find("more boxes than bytes"), std::string::npos)
      << too_many.ToString();
  EXPECT_EQ(ParsePacked("[[],[],[],[],[],[]]", "[]").status().kind(),
            ErrorKind::kCorrupt);
  EXPECT_EQ(ParsePacked(boxes, "[4]").status().tensor(), "p");
  EXPECT_EQ(
      ParsePacked(boxes, "[281474976710655,281474976710655]").status().kind(),
      ErrorKind::kCorrupt);
  EXPECT_EQ(ParsePacked(boxes, "[4,5]", {2, 3}).status().kind(),
            ErrorKind::kCorrupt);
  // With offsets, without a shape, of a tensor that there is not.
  for (const std::vector<std::pair<std::string, std::string>>& metadata :
       {std::vector<std::pair<std::string, std::string>>{
            {"DCP_SHARDING_INFO", "{\"c\":{\"saved_offsets\":[0,0]}}"},
            {"torch_ckpt.global_shapes", "{\"c\":[4,5]}"},
            {"torch_ckpt.packed_boxes", "{\"c\":[[0,0,1,1]]}"}},
        {{"torch_ckpt.packed_boxes", "{\"b\":[[]]}"}},
        {{"torch_ckpt.packed_boxes", "{\"z\":[[0,1]]}"}}}) {
    EXPECT_EQ(ParseShardingInfo(Header(metadata)).status().kind(),
              ErrorKind::kCorrupt);
  }
}

TEST(ShardingInfo, PeekFileId) {
  const auto header =
      BuildSafetensorsHeader(BuildFileMetadata(kId, {}, nullptr), {});
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(PeekFileId(AsBytes(*header)), kId);
  EXPECT_EQ(PeekFileId(AsBytes(*header).first(79)), "");
  EXPECT_EQ(PeekFileId({}), "");
  const auto foreign = BuildSafetensorsHeader({{"format", "pt"}}, {});
  EXPECT_EQ(PeekFileId(AsBytes(*foreign)), "");
  std::string upper = *header;
  upper[8 + 40] = 'B';
  EXPECT_EQ(PeekFileId(AsBytes(upper)), "");
}

}  // namespace
}  // namespace torch_ckpt
