#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "format/names.h"
#include "names_test_util.h"

namespace torch_ckpt {
namespace {

TEST(FormatNames, StockNames) {
  EXPECT_EQ(FinalFileName(2, 10), "model-00002-of-00010.safetensors");
  EXPECT_EQ(ObjectFileName(7), "objects-00008.json");
}

TEST(FormatNames, Shards) {
  EXPECT_EQ(RankOfShard("shard-00008-model-00001-of-00003.safetensors"), 7);
  EXPECT_EQ(RankOfShard("shard-123457-model-00002-of-100000.safetensors"),
            123456);
  EXPECT_EQ(RankOfShard("shard-x-model-00001-of-00001.safetensors"),
            std::nullopt);
  EXPECT_TRUE(IsShardName("shard-x-model-00001-of-00001.safetensors"));
  EXPECT_FALSE(IsShardName(FinalFileName(1, 1)));
  EXPECT_FALSE(IsShardName("shard-00001-model-00001-of-00001.bin"));
  EXPECT_EQ(SingleFileName(kIndexName), "model.safetensors");
}

TEST(FormatNames, Numbered) {
  const auto expect = [](std::string_view name, std::string_view stem,
                         int64_t index, int64_t count) {
    const auto numbered = ParseNumberedName(name);
    ASSERT_TRUE(numbered) << name;
    EXPECT_EQ(numbered->stem, stem) << name;
    EXPECT_EQ(numbered->index, index) << name;
    EXPECT_EQ(numbered->count, count) << name;
  };
  expect(FinalFileName(2, 3), "model", 2, 3);
  expect(ShardFileName(0, 1, 1), "model", 1, 1);
  expect(ShardFileName(123456, 7, 100000), "model", 7, 100000);
  expect("diffusion_pytorch_model-00001-of-00002.safetensors",
         "diffusion_pytorch_model", 1, 2);
  expect("shard-x-model-00001-of-00002.safetensors", "shard-x-model", 1, 2);
  expect("shard-00001-of-00002.safetensors", "shard", 1, 2);
  for (const char* name :
       {"model.safetensors", "model-1-of-2.safetensors",
        "model-00003-of-00002.safetensors", "model-00000-of-00002.safetensors",
        "model-00001-of-00002.bin", "-of-00002.safetensors",
        "00001-of-00002.safetensors", "model-00001-of-.safetensors",
        ".safetensors", ""}) {
    EXPECT_FALSE(ParseNumberedName(name)) << name;
  }
}

TEST(FormatNames, FileNamesThatAreRefused) {
  const std::vector<std::string> bad = {
      "",
      ".",
      "..",
      "../x",
      "a/b",
      "/etc/passwd",
      "a\\b",
      "..\\x",
      "C:\\x",
      "C:x",
      "x:stream",
      ".hidden",
      std::string("a\0b", 3),
      std::string(1, '\0'),
      "a\nb",
      "a\rb",
      "a\x1b[2J",
      "a\x7f",
      "\xFF",
      "\xC0\xAF",  // an overlong '/'
      std::string(256, 'a'),
  };
  for (const std::string& name : bad)
    EXPECT_EQ(CheckFileName(name).kind(), ErrorKind::kCorrupt) << name;
}

TEST(FormatNames, FileNamesThatAreTaken) {
  for (const std::string& name :
       {std::string("a"), std::string("model-00001-of-00002.safetensors"),
        std::string("a b"), std::string("a..b"), std::string("\xC3\xA9"),
        std::string(255, 'a')})
    EXPECT_TRUE(CheckFileName(name).ok()) << name;
}

TEST(FormatNames, FilePaths) {
  const std::string deepest = "a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a";
  std::string longest(255, 'a');
  for (int i = 0; i < 15; ++i) longest.append("/").append(255, 'a');
  ASSERT_EQ(longest.size(), 4095u);
  for (const std::string& path :
       std::vector<std::string>{"a", "a/b.safetensors", deepest, longest}) {
    EXPECT_TRUE(CheckFilePath(path).ok()) << path;
  }
  std::vector<std::string> bad = {
      "",       "/",      "/a",    "a/",         "a//b",       "./a",
      "a/.",    "a/../b", "../a",  "a/..",       ".hidden/a",  "a/.hid",
      "a/b\\c", "a/C:b",  "a/b\n", "a/\xC0\xAF", longest + "a"};
  bad.push_back(deepest + "/a");
  bad.push_back("a/");
  bad.back().append(256, 'a');
  bad.push_back(std::string("a/b\0", 4));
  for (const std::string& path : bad) {
    EXPECT_EQ(CheckFilePath(path).kind(), ErrorKind::kCorrupt) << path;
  }
}

TEST(FormatNames, MessagesShowNoControlCharacters) {
  const Status status = CheckFileName("a\x1b[2J");
  EXPECT_EQ(status.message().find('\x1b'), std::string::npos);
}

TEST(FormatNames, TensorNames) {
  EXPECT_TRUE(CheckTensorName("").ok());
  EXPECT_TRUE(CheckTensorName("../a/b\n").ok());
  EXPECT_TRUE(CheckTensorName(std::string(kMaxNameBytes, 'a')).ok());
  for (const std::string& name :
       {std::string("__metadata__"), std::string("a\0", 2),
        std::string("\xED\xA0\x80"), std::string(kMaxNameBytes + 1, 'a')})
    EXPECT_EQ(CheckTensorName(name).kind(), ErrorKind::kInvalidArgument);
}

TEST(FormatNames, Utf8) {
  for (const char* good :
       {"", "a", "\x7f", "\xC2\x80", "\xE0\xA0\x80", "\xED\x9F\xBF",
        "\xEE\x80\x80", "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"})
    EXPECT_TRUE(IsUtf8(good));
  for (const char* bad :
       {"\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF", "\xE2\x82",
        "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80", "a\xE2\x28\xA1"})
    EXPECT_FALSE(IsUtf8(bad));
}

TEST(FormatNames, Utf8AnywhereInAText) {
  for (size_t size = 0; size < 40; ++size) {
    const std::string text(size, 'a');
    EXPECT_TRUE(IsUtf8(text));
    for (size_t at = 0; at <= size; ++at) {
      EXPECT_TRUE(IsUtf8(std::string(text).insert(at, "\xE2\x82\xAC")));
      for (const char* bad : {"\x80", "\xE2\x82", "\xFF", "\xC0\x80"}) {
        EXPECT_FALSE(IsUtf8(std::string(text).insert(at, bad))) << at;
      }
    }
  }
}

TEST(FormatNames, FindDuplicate) {
  std::vector<std::string> text;
  for (int i = 0; i < 1000; ++i) text.push_back(std::to_string(i));
  for (size_t n : {size_t{0}, size_t{1}, size_t{8}, size_t{9}, size_t{1000}}) {
    std::vector<std::string_view> names(text.begin(),
                                        text.begin() + static_cast<long>(n));
    EXPECT_EQ(FindDuplicate(names), std::nullopt);
    if (n == 0) continue;
    names.push_back(names[n / 2]);
    EXPECT_EQ(FindDuplicate(names), names[n / 2]);
  }
}

TEST(FormatNames, Ids) {
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const std::string id = NewId();
    EXPECT_TRUE(IsId(id)) << id;
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 100u);
  const std::string id(32, 'a');
  EXPECT_TRUE(IsId(id));
  EXPECT_FALSE(IsId(id + "a"));
  EXPECT_FALSE(IsId(id.substr(1)));
  EXPECT_FALSE(IsId(std::string(32, 'A')));
  EXPECT_FALSE(IsId(std::string(32, 'g')));
  const std::string staged = StagedName("m.safetensors", id);
  EXPECT_EQ(staged, "m.safetensors." + id);
  EXPECT_FALSE(staged.ends_with(kDataSuffix));
  EXPECT_TRUE(CheckFileName(staged).ok());
}

TEST(FormatNames, OfParts) {
  EXPECT_EQ(PartManifestName(0, 2), "torch_ckpt-00001-of-00002.json");
  EXPECT_EQ(PartCatalogName(1, 2), "torch_ckpt-00002-of-00002.catalog");
  EXPECT_EQ(PartStageName(1), ".torch_ckpt-stage-00002");
  for (const int64_t rank : {0, 41, 123456}) {
    EXPECT_TRUE(IsPartManifestName(PartManifestName(rank, 200000)));
    EXPECT_EQ(RankOfPartStage(PartStageName(rank)), rank);
    for (const std::string& name :
         {ShardFileName(rank, 1, 2), ObjectFileName(rank),
          PartManifestName(rank, 200000), PartCatalogName(rank, 200000),
          StagedName(ShardFileName(rank, 1, 1), std::string(32, 'a'))}) {
      EXPECT_EQ(RankOfFile(name), rank) << name;
    }
  }
  for (const char* other :
       {"torch_ckpt.json", "model-00001-of-00001.safetensors", "shard-1-x",
        "shard-00000-x", "shard-", "objects-0000a.json", "config.json", ""}) {
    EXPECT_FALSE(RankOfFile(other).has_value()) << other;
  }
  for (const char* other :
       {"torch_ckpt.json", "torch_ckpt-00001-of-00002.catalog",
        "torch_ckpt-00003-of-00002.json", "torch_ckpt-00000-of-00002.json",
        "torch_ckpt-1-of-2.json", "torch_ckpt-00001-of-.json",
        "torch_ckpt-00001-of-00002.json.json", "torch_ckpt-00001.json",
        "torch_ckpt-0000a-of-00002.json", "torch_ckpt--0001-of-00002.json",
        "torch_ckpt-00001-of-099999999999999999999.json", "torch_ckpt-.json",
        "torch_ckpt-00001-of-json", ""}) {
    EXPECT_FALSE(IsPartManifestName(other)) << other;
  }
  for (const char* other : {".torch_ckpt-stage", ".torch_ckpt-stage-00000",
                            ".torch_ckpt-stage-1", ".torch_ckpt-stage-"}) {
    EXPECT_FALSE(RankOfPartStage(other).has_value()) << other;
  }
}

}  // namespace
}  // namespace torch_ckpt
