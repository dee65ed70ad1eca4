#include <gtest/gtest.h>

#include <random>

#include "format/safetensors/safetensors.h"

namespace torch_ckpt {
namespace {

using Metadata = std::vector<std::pair<std::string, std::string>>;

Result<SafetensorsHeader> Parse(std::string_view header, uint64_t data_bytes) {
  return ParseSafetensorsHeader(AsBytes(header),
                                8 + header.size() + data_bytes);
}

// "t" as a float32 vector, with `rest` after it in the root.
std::string WithT(std::string_view rest) {
  return "{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}" +
         std::string(rest) + "}";
}
std::string Entry(std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return "{\"t\":{\"dtype\":" + std::string(dtype) +
         ",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}}";
}
std::string F32(std::string_view shape, std::string_view offsets) {
  return Entry("\"F32\"", shape, offsets);
}

struct Case {
  const char* why;
  std::string header;
  uint64_t data_bytes;
  ErrorKind kind = ErrorKind::kCorrupt;
};

std::string Repeat(std::string_view s, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += s;
  return out;
}

// One of each rule of docs/format.md, most with their neighbours.
std::vector<Case> Malformed() {
  const std::string kNul(1, '\0');
  return {
      // Rule 5: UTF-8.
      {"stray continuation byte", WithT(",\"\x80\":1"), 4},
      {"overlong slash", WithT(",\"\xC0\xAF\":1"), 4},
      {"raw surrogate", WithT(",\"\xED\xA0\x80\":1"), 4},
      {"above U+10FFFF", WithT(",\"\xF4\x90\x80\x80\":1"), 4},
      {"cut sequence", "{\"__metadata__\":{\"a\":\"\xE2\x82\"}}", 0},
      {"Latin-1 value", "{\"__metadata__\":{\"a\":\"\xE9\"}}", 0},
      // Rule 6: one JSON object, nothing before, only spaces behind.
      {"nothing", "", 0},
      {"only spaces", "    ", 0},
      {"leading space", " {}", 0},
      {"leading newline", "\n{}", 0},
      {"byte order mark", "\xEF\xBB\xBF{}", 0},
      {"trailing newline", "{}\n", 0},
      {"trailing tab", "{}\t", 0},
      {"trailing CR", "{} \r ", 0},
      {"trailing NUL", "{}" + kNul, 0},
      {"NUL then more JSON", "{}" + kNul + "{}", 0},
      {"two objects", "{}{}", 0},
      {"array root", "[]", 0},
      {"string root", "\"a\"", 0},
      {"number root", "12", 0},
      {"null root", "null", 0},
      {"unclosed", "{\"a\":{", 0},
      {"trailing comma", WithT(","), 4},
      {"comment", WithT("/* */"), 4},
      {"single quotes", "{'t':1}", 0},
      {"bare word", "{t:1}", 0},
      {"NaN", WithT(",\"u\":NaN"), 4},
      {"control character in a name", WithT(",\"a\nb\":1"), 4},
      {"bad escape", WithT(",\"\\x41\":1"), 4},
      {"garbage behind spaces", "{}   x", 0},
      // Rule 7: __metadata__.
      {"metadata is a string", "{\"__metadata__\":\"pt\"}", 0},
      {"metadata is an array", "{\"__metadata__\":[]}", 0},
      {"metadata is a number", "{\"__metadata__\":1}", 0},
      {"metadata is true", "{\"__metadata__\":true}", 0},
      {"metadata value number", "{\"__metadata__\":{\"a\":1}}", 0},
      {"metadata value null", "{\"__metadata__\":{\"a\":null}}", 0},
      {"metadata value object", "{\"__metadata__\":{\"a\":{}}}", 0},
      {"metadata value array", "{\"__metadata__\":{\"a\":[\"b\"]}}", 0},
      {"metadata value bool", "{\"__metadata__\":{\"a\":false}}", 0},
      // Rule 8: the entry.
      {"entry is null", "{\"t\":null}", 0},
      {"entry is a string", "{\"t\":\"F32\"}", 0},
      {"entry is a number", "{\"t\":3}", 0},
      {"entry as an array", "{\"t\":[\"F32\",[1],[0,4]]}", 4},
      {"entry is empty", "{\"t\":{}}", 0},
      {"no dtype", "{\"t\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4},
      {"no shape", "{\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4},
      {"no offsets", "{\"t\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4},
      {"key of other case",
       "{\"t\":{\"Dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4},
      {"no offset at all", F32("[0]", "[]"), 0},
      {"one offset", F32("[1]", "[4]"), 4},
      {"three offsets", F32("[1]", "[0,4,4]"), 4},
      {"offsets as an object", F32("[1]", "{\"0\":4}"), 4},
      {"offsets as a string", F32("[1]", "\"0,4\""), 4},
      {"offsets as null", F32("[1]", "null"), 4},
      {"nested offsets", F32("[1]", "[[0,4]]"), 4},
      // Rule 9: the dtypes.
      {"unknown dtype", Entry("\"F128\"", "[1]", "[0,16]"), 16},
      {"dtype in lower case", Entry("\"f32\"", "[1]", "[0,4]"), 4},
      {"empty dtype", Entry("\"\"", "[1]", "[0,4]"), 4},
      {"dtype with a space", Entry("\"F32 \"", "[1]", "[0,4]"), 4},
      {"dtype is null", Entry("null", "[1]", "[0,4]"), 4},
      {"dtype is a number", Entry("7", "[1]", "[0,4]"), 4},
      {"dtype as an object", Entry("{\"F32\":null}", "[1]", "[0,4]"), 4},
      {"dtype with a NUL", Entry("\"F32\\u0000\"", "[1]", "[0,4]"), 4},
      // Rule 10: the numbers.
      {"negative dimension", F32("[-1]", "[0,4]"), 4},
      {"minus zero", F32("[-0]", "[0,0]"), 0},
      {"float dimension", F32("[1.0]", "[0,4]"), 4},
      {"exponent", F32("[1e0]", "[0,4]"), 4},
      {"string dimension", F32("[\"1\"]", "[0,4]"), 4},
      {"bool dimension", F32("[true]", "[0,4]"), 4},
      {"null dimension", F32("[null]", "[0,4]"), 4},
      {"nested shape", F32("[[1]]", "[0,4]"), 4},
      {"shape is a number", F32("1", "[0,4]"), 4},
      {"shape is null", F32("null", "[0,4]"), 4},
      {"leading zero", F32("[01]", "[0,4]"), 4},
      {"plus sign", F32("[+1]", "[0,4]"), 4},
      {"2^48", F32("[281474976710656]", "[0,0]"), 0},
      {"2^64", F32("[18446744073709551616]", "[0,0]"), 0},
      {"negative offset", F32("[1]", "[-4,0]"), 4},
      {"float offset", F32("[1]", "[0,4.0]"), 4},
      {"huge offset", F32("[1]", "[0,18446744073709551616]"), 4},
      // Rule 11: tiling.
      {"first not at 0", F32("[1]", "[4,8]"), 8},
      {"backwards", F32("[1]", "[4,0]"), 4},
      {"backwards from a huge offset", F32("[1]", "[18446744073709551615,3]"),
       4},
      {"hole",
       WithT(",\"u\":{\"dtype\":\"U8\",\"shape\":[1],"
             "\"data_offsets\":[5,6]}"),
       6},
      {"overlap",
       WithT(",\"u\":{\"dtype\":\"U8\",\"shape\":[1],"
             "\"data_offsets\":[3,4]}"),
       4},
      {"same place twice",
       WithT(",\"u\":{\"dtype\":\"F32\",\"shape\":[1],"
             "\"data_offsets\":[0,4]}"),
       4},
      {"empty one in the middle of another",
       WithT(",\"u\":{\"dtype\":\"U8\",\"shape\":[0],"
             "\"data_offsets\":[2,2]}"),
       4},
      {"empty one behind the end",
       WithT(",\"u\":{\"dtype\":\"U8\",\"shape\":[0],"
             "\"data_offsets\":[9,9]}"),
       4},
      // Rule 12: the size.
      {"too short for its shape", F32("[2]", "[0,4]"), 4},
      {"too long for its shape", F32("[1]", "[0,8]"), 8},
      {"bytes for an empty tensor", F32("[0]", "[0,4]"), 4},
      {"no bytes for a scalar", F32("[]", "[0,0]"), 0},
      {"half a byte of F4", Entry("\"F4\"", "[3]", "[0,2]"), 2},
      {"scalar F4", Entry("\"F4\"", "[]", "[0,1]"), 1},
      {"F6 of 3 elements", Entry("\"F6_E2M3\"", "[3]", "[0,3]"), 3},
      {"product overflows", F32("[281474976710655,281474976710655]", "[0,4]"),
       4},
      {"product overflows to 0", F32("[4294967296,4294967296]", "[0,0]"), 0},
      {"bits overflow", F32("[2199023255552,4194303]", "[0,4]"), 4},
      // Rule 18: whatever the order of the dimensions is.
      {"0 behind an overflow",
       F32("[281474976710655,281474976710655,0]", "[0,0]"), 0},
      {"0 before an overflow",
       F32("[0,281474976710655,281474976710655]", "[0,0]"), 0},
      // Rule 13: the end of the file.
      {"one byte too many", F32("[1]", "[0,4]"), 5},
      {"one byte too few", F32("[1]", "[0,4]"), 3},
      {"data for no tensor", "{}", 1},
      // Rule 14: twins.
      {"twin tensors",
       WithT(",\"t\":{\"dtype\":\"F32\",\"shape\":[1],"
             "\"data_offsets\":[4,8]}"),
       8},
      {"equal twins",
       WithT(",\"t\":{\"dtype\":\"F32\",\"shape\":[1],"
             "\"data_offsets\":[0,4]}"),
       4},
      {"twins by an escape",
       WithT(",\"\\u0074\":{\"dtype\":\"F32\","
             "\"shape\":[1],\"data_offsets\":[4,8]}"),
       8},
      {"twin empty tensors",
       "{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
       "\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
       0},
      {"twin dtype",
       "{\"t\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],"
       "\"data_offsets\":[0,4]}}",
       4},
      {"twin shape",
       "{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],"
       "\"data_offsets\":[0,4]}}",
       4},
      {"twin metadata", "{\"__metadata__\":{},\"__metadata__\":{}}", 0},
      {"twin metadata, one null", "{\"__metadata__\":null,\"__metadata__\":{}}",
       0},
      {"twin metadata keys", "{\"__metadata__\":{\"a\":\"1\",\"a\":\"1\"}}", 0},
      // Rule 17: nesting and names.
      {"deep", "{\"t\":" + Repeat("[", 200) + Repeat("]", 200) + "}", 0},
      {"very deep", Repeat("{\"a\":", 100000), 0},
      {"NUL in a name",
       WithT(",\"a\\u0000\":{\"dtype\":\"U8\",\"shape\":[0],"
             "\"data_offsets\":[4,4]}"),
       4},
      {"lone high surrogate", WithT(",\"\\ud800\":1"), 4},
      {"lone low surrogate", WithT(",\"\\udc00\":1"), 4},
      {"surrogates swapped", WithT(",\"\\udc00\\ud800\":1"), 4},
      // Limits of this build.
      {"nine dimensions", F32("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4,
       ErrorKind::kUnsupported},
      {"name of 65536 bytes",
       WithT(",\"" + std::string(65536, 'n') +
             "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}"),
       4, ErrorKind::kUnsupported},
  };
}

TEST(SafetensorsParse, RefusesEveryMalformedHeader) {
  const auto cases = Malformed();
  EXPECT_GE(cases.size(), 110u);
  for (const Case& c : cases) {
    const auto parsed = Parse(c.header, c.data_bytes);
    EXPECT_EQ(parsed.status().kind(), c.kind)
        << c.why << ": " << parsed.status().ToString();
  }
}

TEST(SafetensorsParse, NamesTheTensor) {
  EXPECT_EQ(Parse(F32("[2]", "[0,4]"), 4).status().tensor(), "t");
  EXPECT_EQ(Parse(F32("[-1]", "[0,4]"), 4).status().tensor(), "t");
  EXPECT_EQ(Parse(F32("[1]", "[4,8]"), 8).status().tensor(), "t");
}

TEST(SafetensorsParse, AcceptsWhatStockWrites) {
  for (const char* header :
       {"{}", "{}      ", "{\"__metadata__\":null}", "{\"__metadata__\":{}}",
        "{ \"__metadata__\" : { \"format\" : \"pt\" } }  "})
    EXPECT_TRUE(Parse(header, 0).ok()) << header;

  const auto scalar = Parse(F32("[]", "[0,4]"), 4);
  ASSERT_TRUE(scalar.ok()) << scalar.status().ToString();
  EXPECT_EQ(scalar->tensors[0].shape.size(), 0);

  const auto none = Parse(F32("[3,0,2]", "[0,0]"), 0);
  ASSERT_TRUE(none.ok()) << none.status().ToString();
  EXPECT_EQ(none->tensors[0].shape, (Dims{3, 0, 2}));

  EXPECT_TRUE(Parse(F32("[1,1,1,1,1,1,1,1]", "[0,4]"), 4).ok());
  EXPECT_TRUE(Parse(Entry("\"F4\"", "[3,2]", "[0,3]"), 3).ok());
  EXPECT_TRUE(Parse(Entry("\"F6_E3M2\"", "[2,2]", "[0,3]"), 3).ok());
  EXPECT_TRUE(Parse(F32("[0,281474976710655]", "[0,0]"), 0).ok());
  // Keys of an entry in any order; white space between tokens.
  EXPECT_TRUE(Parse("{\"t\": {\"data_offsets\":[0, 4], \"shape\":[1],\n"
                    "\"dtype\":\"F32\"}}",
                    4)
                  .ok());
}

TEST(SafetensorsParse, SortsByOffsetWithEmptyTensorsInPlace) {
  const auto parsed = Parse(
      "{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},"
      "\"y\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},"
      "\"__metadata__\":{\"k\":\"v\",\"a\":\"\"},"
      "\"x\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[1,1]},"
      "\"a\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[0,1]}}  ",
      3);
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  std::string order;
  for (const auto& t : parsed->tensors) order += t.name;
  EXPECT_EQ(order, "ayxb");
  EXPECT_EQ(parsed->metadata, (Metadata{{"k", "v"}, {"a", ""}}));
  EXPECT_EQ(*parsed->FindMetadata("k"), "v");
  EXPECT_EQ(parsed->FindMetadata("z"), nullptr);
  EXPECT_EQ(parsed->data_begin + 3, parsed->file_bytes);
}

TEST(SafetensorsParse, HeaderLength) {
  const auto length = [](uint64_t value, uint64_t file_bytes) {
    std::string raw;
    AppendU64(&raw, value);
    return ParseHeaderLength(AsBytes(raw), file_bytes);
  };
  ASSERT_TRUE(length(2, 10).ok());
  EXPECT_EQ(*length(2, 10), 2u);
  EXPECT_EQ(*length(100'000'000, 100'000'008), 100'000'000u);
  EXPECT_FALSE(length(100'000'001, 200'000'000).ok());
  EXPECT_FALSE(length(2, 9).ok());
  EXPECT_FALSE(length(0, 100).ok());
  EXPECT_FALSE(length(1, 100).ok());
  EXPECT_FALSE(length(UINT64_MAX, UINT64_MAX).ok());
  EXPECT_FALSE(length(UINT64_MAX - 7, UINT64_MAX).ok());
  EXPECT_FALSE(ParseHeaderLength(AsBytes("1234567"), 7).ok());
  EXPECT_FALSE(ParseHeaderLength({}, 0).ok());
  EXPECT_FALSE(ParseSafetensorsHeader(AsBytes("{}"), 9).ok());
}

TEST(SafetensorsParse, EveryCutOfAGoodHeaderIsRefused) {
  const std::string good = WithT(",\"__metadata__\":{\"a\":\"b\"}");
  ASSERT_TRUE(Parse(good, 4).ok());
  for (size_t n = 0; n < good.size(); ++n)
    EXPECT_FALSE(Parse(good.substr(0, n), 4).ok()) << n;
}

TEST(SafetensorsParse, ManyMetadataKeysAreTooMany) {
  std::string text = R"({"__metadata__":{)";
  for (uint64_t key = 0; key <= kMaxMetadataEntries; ++key) {
    text += (key ? ",\"" : "\"") + std::to_string(key) + "\":\"\"";
  }
  text += "}}";
  const auto parsed =
      ParseSafetensorsHeader(AsBytes(text), text.size() + sizeof(uint64_t));
  EXPECT_FALSE(parsed.ok());
  EXPECT_NE(parsed.status().message().find("metadata"), std::string::npos)
      << parsed.status().ToString();
}

TEST(SafetensorsBuild, GoldenBytes) {
  const Metadata metadata = {{"format", "pt"}, {"q\"\\\n\x01", "\xC3\xA9"}};
  const std::vector<SafetensorsEntry> tensors = {
      {"a.w", Dtype::kBF16, {2, 3}, 0, 12},
      {"s", Dtype::kF64, {}, 12, 20},
      {"e", Dtype::kI8, {0}, 20, 20}};
  const auto built = BuildSafetensorsHeader(metadata, tensors);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  std::string golden;
  AppendU64(&golden, 4088);
  golden +=
      "{\"__metadata__\":{\"format\":\"pt\",\"q\\\"\\\\\\n\\u0001\":"
      "\"\xC3\xA9\"},"
      "\"a.w\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
      "\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[12,20]},"
      "\"e\":{\"dtype\":\"I8\",\"shape\":[0],\"data_offsets\":[20,20]}}";
  golden.resize(4096, ' ');
  EXPECT_EQ(*built, golden);

  const auto bare = BuildSafetensorsHeader({}, {});
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->size(), 4096u);
  EXPECT_EQ(bare->substr(8, 3), "{} ");
}

TEST(SafetensorsBuild, RefusesWhatItWouldNotRead) {
  using Tensors = std::vector<SafetensorsEntry>;
  const auto built = [](const Metadata& m, const Tensors& t) {
    return BuildSafetensorsHeader(m, t).status().kind();
  };
  const ErrorKind kBad = ErrorKind::kInvalidArgument;
  const SafetensorsEntry a{"a", Dtype::kU8, {1}, 0, 1};
  EXPECT_EQ(built({}, {a}), ErrorKind::kOk);
  EXPECT_EQ(built({}, {a, a}), kBad);
  EXPECT_EQ(built({}, {a, {"a", Dtype::kU8, {1}, 1, 2}}), kBad);
  EXPECT_EQ(built({}, {{"a", Dtype::kU8, {1}, 1, 2}}), kBad);
  EXPECT_EQ(built({}, {{"a", Dtype::kU8, {2}, 0, 1}}), kBad);
  EXPECT_EQ(built({}, {{"a", Dtype::kU8, {-1}, 0, 0}}), kBad);
  EXPECT_EQ(built({}, {{"a", Dtype::kF4, {3}, 0, 2}}), kBad);
  EXPECT_EQ(built({}, {{"__metadata__", Dtype::kU8, {1}, 0, 1}}), kBad);
  EXPECT_EQ(built({}, {{"\xFF", Dtype::kU8, {1}, 0, 1}}), kBad);
  EXPECT_EQ(built({}, {{std::string("a\0", 2), Dtype::kU8, {1}, 0, 1}}), kBad);
  EXPECT_EQ(built({{"k", "\xFF"}}, {}), kBad);
  EXPECT_EQ(built({{"k", ""}, {"k", ""}}, {}), kBad);
  EXPECT_EQ(built({{"k", std::string(100'000'000, 'x')}}, {}),
            ErrorKind::kUnsupported);
}

TEST(SafetensorsBuild, RandomHeadersComeBack) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    std::vector<SafetensorsEntry> tensors;
    uint64_t at = 0;
    for (uint64_t i = 0, n = below(40); i < n; ++i) {
      SafetensorsEntry t;
      t.name = "n" + std::to_string(i);
      for (uint64_t k = below(6); k-- > 0;)
        t.name += static_cast<char>(below(0x7f) + 1);
      t.dtype = static_cast<Dtype>(below(kDtypeCount));
      for (uint64_t d = below(kMaxDims); d-- > 0;)
        t.shape.push_back(static_cast<int64_t>(below(5)));
      t.shape.push_back(static_cast<int64_t>(4 * below(3)));
      t.begin = at;
      at += *ByteSize(t.dtype, t.shape);
      t.end = at;
      tensors.push_back(t);
    }
    const Metadata metadata = {
        {"k" + std::to_string(round), "\"\t\xE2\x82\xAC"}};
    const auto built = BuildSafetensorsHeader(metadata, tensors);
    ASSERT_TRUE(built.ok()) << built.status().ToString();
    ASSERT_EQ(built->size() % kDataAlignment, 0u);
    const uint64_t file_bytes = built->size() + at;
    const auto length = ParseHeaderLength(AsBytes(*built).first(8), file_bytes);
    ASSERT_TRUE(length.ok());
    ASSERT_EQ(*length + 8, built->size());
    const auto parsed =
        ParseSafetensorsHeader(AsBytes(*built).subspan(8), file_bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    EXPECT_EQ(parsed->metadata, metadata);
    EXPECT_EQ(parsed->data_begin, built->size());
    // An empty tensor behind a full one of the same begin does not exist
    // here: begins only grow. So the order is the order that was given.
    ASSERT_EQ(parsed->tensors.size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(parsed->tensors[i].name, tensors[i].name);
      EXPECT_EQ(parsed->tensors[i].dtype, tensors[i].dtype);
      EXPECT_EQ(parsed->tensors[i].shape, tensors[i].shape);
      EXPECT_EQ(parsed->tensors[i].begin, tensors[i].begin);
      EXPECT_EQ(parsed->tensors[i].end, tensors[i].end);
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
