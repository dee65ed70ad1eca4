#include <gtest/gtest.h>

#include "format/safetensors/hf_index.h"

namespace torch_ckpt {
namespace {

Result<HfIndex> Parse(std::string_view text) {
  return ParseHfIndex(AsBytes(text));
}

TEST(HfIndex, GoldenText) {
  HfIndex index;
  index.total_size = 12;
  index.weight_map = {{"a.w", "m.safetensors"}, {"b\"", "n.safetensors"}};
  const std::string text = BuildHfIndex(index);
  EXPECT_EQ(text,
            "{\n"
            "  \"metadata\": {\n"
            "    \"total_size\": 12\n"
            "  },\n"
            "  \"weight_map\": {\n"
            "    \"a.w\": \"m.safetensors\",\n"
            "    \"b\\\"\": \"n.safetensors\"\n"
            "  }\n"
            "}");
  const auto parsed = Parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->total_size, 12u);
  EXPECT_EQ(parsed->weight_map, index.weight_map);
  const auto empty = Parse(BuildHfIndex({}));
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->weight_map.empty());
}

TEST(HfIndex, AcceptsWhatTheHubHolds) {
  struct {
    const char* text;
    uint64_t total_size;
  } const cases[] = {
      {"{\"weight_map\":{}}", 0},
      {"{\"metadata\":null,\"weight_map\":{}}", 0},
      {"{\"metadata\":{},\"weight_map\":{}}\n", 0},
      {" {\"weight_map\":{},\"metadata\":{\"total_size\":7}}", 7},
      {"{\"metadata\":{\"total_size\":26906.0},\"weight_map\":{}}", 26906},
      {"{\"metadata\":{\"total_size\":125.5},\"weight_map\":{}}", 125},
      {"{\"metadata\":{\"mergekit_version\":\"0.0.4\",\"x\":[{\"y\":-1.5},"
       "null,true],\"total_size\":9},\"weight_map\":{},\"extra\":[1,{}]}",
       9},
      {"{\"metadata\":{\"total_size\":\"20\"},\"weight_map\":{}}", 0},
      {"{\"metadata\":{\"total_size\":null},\"weight_map\":{}}", 0},
      {"{\"metadata\":{\"total_size\":true},\"weight_map\":{}}", 0},
      {"{\"metadata\":{\"total_size\":[1,{}]},\"weight_map\":{}}", 0},
      {"{\"metadata\":{\"total_size\":-1},\"weight_map\":{}}", 0},
      {"{\"metadata\":{\"total_size\":1e30},\"weight_map\":{}}", 0},
      {"\xEF\xBB\xBF{\"weight_map\":{}}", 0},
      {"{\"extra\":\"s\",\"more\":null,\"f\":false,\"n\":-2,"
       "\"weight_map\":{}}",
       0},
  };
  for (const auto& c : cases) {
    const auto parsed = Parse(c.text);
    ASSERT_TRUE(parsed.ok()) << c.text << parsed.status().ToString();
    EXPECT_EQ(parsed->total_size, c.total_size) << c.text;
  }
}

TEST(HfIndex, Refuses) {
  const std::string deep(40, '[');
  const std::string cases[] = {
      "",
      "[]",
      "{}",
      "null",
      "{\"metadata\":{}}",
      "{\"weight_map\":null}",
      "{\"weight_map\":[]}",
      "{\"weight_map\":\"a.safetensors\"}",
      "{\"weight_map\":{\"a\":1}}",
      "{\"weight_map\":{\"a\":null}}",
      "{\"weight_map\":{\"a\":{}}}",
      "{\"weight_map\":{\"a\":[\"b.safetensors\"]}}",
      "{\"weight_map\":{\"a\":true}}",
      "{\"weight_map\":{\"a\":-1}}",
      "{\"weight_map\":{\"a\":\"\"}}",
      "{\"weight_map\":{\"a\":\"b.bin\"}}",
      "{\"weight_map\":{\"a\":\"../b.safetensors\"}}",
      "{\"weight_map\":{\"a\":\"/b.safetensors\"}}",
      "{\"weight_map\":{\"a\":\"d\\\\b.safetensors\"}}",
      "{\"weight_map\":{\"a\":\"C:b.safetensors\"}}",
      "{\"weight_map\":{\"a\":\".safetensors\"}}",
      "{\"weight_map\":{\"a\":\"b\\u0000.safetensors\"}}",
      "{\"weight_map\":{\"a\\u0000\":\"b.safetensors\"}}",
      "{\"weight_map\":{\"a\":\"b.safetensors\",\"a\":\"b.safetensors\"}}",
      "{\"weight_map\":{},\"weight_map\":{}}",
      "{\"metadata\":{\"x\":1,\"x\":1},\"weight_map\":{}}",
      "{\"other\":{\"x\":1,\"x\":1},\"weight_map\":{}}",
      "{\"metadata\":[],\"weight_map\":{}}",
      "{\"weight_map\":{}} x",
      "{\"weight_map\":{},}",
      "{\"x\":" + deep,
      std::string("{\"weight_map\":{}}\0", 18),
      "{\"weight_map\":{\"\xFF\":\"b.safetensors\"}}",
  };
  for (const std::string& text : cases)
    EXPECT_EQ(Parse(text).status().kind(), ErrorKind::kCorrupt) << text;
}

TEST(HfIndex, PathsBelowTheDirectory) {
  const auto parsed = Parse(
      "{\"weight_map\":{\"a\":\"./b.safetensors\",\"c\":\"d/./"
      "e.safetensors\"}}");
  EXPECT_EQ(parsed.status().kind(), ErrorKind::kCorrupt);
  const auto below = Parse(
      "{\"weight_map\":{\"a\":\"./b.safetensors\",\"c\":\"d/e.safetensors\"}}");
  ASSERT_TRUE(below.ok()) << below.status().ToString();
  EXPECT_EQ(below->weight_map[0].second, "b.safetensors");
  EXPECT_EQ(below->weight_map[1].second, "d/e.safetensors");
  for (const char* outside :
       {"./../b.safetensors", "d/../../b.safetensors", ".//b.safetensors"}) {
    const auto refused =
        Parse("{\"weight_map\":{\"a\":\"" + std::string(outside) + "\"}}");
    EXPECT_EQ(refused.status().kind(), ErrorKind::kCorrupt) << outside;
  }
}

TEST(HfIndex, NamesTheTensorOfABadFileName) {
  const auto parsed = Parse("{\"weight_map\":{\"a.w\":\"../b.safetensors\"}}");
  EXPECT_EQ(parsed.status().tensor(), "a.w");
}

}  // namespace
}  // namespace torch_ckpt
