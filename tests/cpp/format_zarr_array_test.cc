#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "format/zarr/zarr_array.h"

namespace torch_ckpt {
namespace {

// As Megatron writes it, with one part replaced.
std::string Text(const std::string& from = "", const std::string& to = "") {
  std::string text = R"({"chunks": [4, 4], "compressor": null, "dtype": "<f4",)"
                     R"( "fill_value": null, "filters": null, "order": "C",)"
                     R"( "shape": [8, 4], "zarr_format": 2})";
  if (!from.empty()) {
    const size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    text.replace(at, from.size(), to);
  }
  return text;
}

TEST(ZarrArrayTest, ReadsWhatMegatronWrites) {
  const auto array = ParseZarrArray(Text());
  ASSERT_TRUE(array.ok()) << array.status().ToString();
  EXPECT_EQ(array->shape, (Dims{8, 4}));
  EXPECT_EQ(array->chunks, (Dims{4, 4}));
  EXPECT_EQ(array->dtype, Dtype::kF32);
  EXPECT_TRUE(
      ParseZarrArray(Text("null, \"filters\"", "0.5, \"filters\"")).ok());
  EXPECT_TRUE(ParseZarrArray(Text("\"zarr_format\"",
                                  "\"dimension_separator\": \".\", "
                                  "\"zarr_format\""))
                  .ok());
  const auto scalar =
      ParseZarrArray(R"({"chunks": [], "compressor": null, "dtype": "|b1",
                         "fill_value": false, "filters": null, "order": "C",
                         "shape": [], "zarr_format": 2})");
  ASSERT_TRUE(scalar.ok()) << scalar.status().ToString();
  EXPECT_EQ(scalar->dtype, Dtype::kBool);
}

TEST(ZarrArrayTest, KnowsTheDtypes) {
  for (const auto& [name, dtype] :
       std::vector<std::pair<const char*, Dtype>>{{"bfloat16", Dtype::kBF16},
                                                  {"<f2", Dtype::kF16},
                                                  {"<f8", Dtype::kF64},
                                                  {"<i2", Dtype::kI16},
                                                  {"<i4", Dtype::kI32},
                                                  {"<i8", Dtype::kI64},
                                                  {"|i1", Dtype::kI8},
                                                  {"|u1", Dtype::kU8},
                                                  {"<c8", Dtype::kC64}}) {
    const auto array = ParseZarrArray(Text("<f4", name));
    ASSERT_TRUE(array.ok()) << name;
    EXPECT_EQ(array->dtype, dtype) << name;
  }
  const auto other = ParseZarrArray(Text("<f4", "<c16"));
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->other_dtype, "complex128");
}

TEST(ZarrArrayTest, RefusesWhatIsNoPlainChunks) {
  for (const auto& [from, to] :
       std::vector<std::pair<const char*, const char*>>{
           {"<f4", ">f4"},
           {"<f4", "|O"},
           {"\"C\"", "\"F\""},
           {"\"compressor\": null", "\"compressor\": {\"id\": \"zlib\"}"},
           {"\"filters\": null", "\"filters\": [{\"id\": \"delta\"}]"},
           {"\"zarr_format\": 2", "\"zarr_format\": 3"},
           {"\"zarr_format\": 2",
            "\"zarr_format\": 2, \"dimension_separator\": \"/\""},
           {"\"zarr_format\": 2", "\"zarr_format\": 2, \"more\": 1"},
           {"[8, 4]", "[8, 4, 1, 1, 1, 1, 1, 1, 1]"},
           {"[8, 4]", "[8, 562949953421312]"}}) {
    const auto array = ParseZarrArray(Text(from, to));
    EXPECT_EQ(array.status().kind(), ErrorKind::kUnsupported) << to;
  }
}

TEST(ZarrArrayTest, RefusesWhatIsNone) {
  for (const auto& [from, to] :
       std::vector<std::pair<const char*, const char*>>{
           {"[4, 4]", "[4]"},
           {"[4, 4]", "[4, 0]"},
           {"[4, 4]", "[4, -1]"},
           {"[4, 4]", "[4, \"4\"]"},
           {"[4, 4]", "[4, 4.0]"},
           {"[4, 4]", "[4, [4]]"},
           {"[4, 4]", "null"},
           {"[4, 4]", "4"},
           {"\"dtype\": \"<f4\", ", ""},
           {"\"order\": \"C\", ", ""},
           {"\"compressor\": null, ", ""},
           {"\"shape\"", "\"chunks\""},
           {"\"<f4\"", "null"},
           {"}", ""}}) {
    const auto array = ParseZarrArray(Text(from, to));
    EXPECT_FALSE(array.ok()) << to;
  }
  EXPECT_FALSE(ParseZarrArray("[]").ok());
  EXPECT_FALSE(
      ParseZarrArray(Text("[8, 4]", "[281474976710655, 281474976710655]"))
          .ok());
}

TEST(ZarrArrayTest, NamesChunks) {
  EXPECT_EQ(ParseZarrChunkName("2.0.11", 3), (Dims{2, 0, 11}));
  EXPECT_EQ(ParseZarrChunkName("0", 0), Dims());
  EXPECT_EQ(ParseZarrChunkName("0", 1), Dims{0});
  for (const char* name : {"", ".", "1.", ".1", "01", "1.2", "-1", "-0", "+1",
                           "1e2", " 1", "999999999999999999999"}) {
    EXPECT_EQ(ParseZarrChunkName(name, 1), std::nullopt) << name;
  }
  EXPECT_EQ(ParseZarrChunkName("1", 0), std::nullopt);
  EXPECT_EQ(ParseZarrChunkName("1", 2), std::nullopt);
  for (const char* name : {"0", "12", "0.0", "1.2.3.4.5.6.7.8"}) {
    EXPECT_TRUE(IsZarrChunkName(name)) << name;
  }
  for (const char* name :
       {"", ".", "x", "0.", "01", "0.x", ".zarray", "1.2.3.4.5.6.7.8.9"}) {
    EXPECT_FALSE(IsZarrChunkName(name)) << name;
  }
  const std::vector<int64_t> chunk = {3, 0};
  EXPECT_EQ(ZarrChunkName(chunk), "3.0");
  EXPECT_EQ(ZarrChunkName({}), "0");
}

}  // namespace
}  // namespace torch_ckpt
