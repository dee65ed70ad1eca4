#include <gtest/gtest.h>

#include "format/ours/manifest.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

const std::string kIdA(32, 'a'), kIdB(32, 'b');

Manifest Sample() {
  Manifest m;
  m.save_id = kIdA;
  m.world_size = 4;
  m.files = {
      {"m.safetensors", kIdA, FileRole::kData, kSegmentBytes + 1, {1, 0xABC}},
      {"empty.safetensors", kIdB, FileRole::kData, 0, {}},
      {"objects-00001.json", kIdB, FileRole::kObjects, 5, {0xFFFFFFFF}},
      {"torch_ckpt.catalog", kIdB, FileRole::kCatalog, kSegmentBytes, {7}},
      {"model.safetensors.index.json", kIdB, FileRole::kIndex, 9, {8}},
      {"extra.bin", kIdB, FileRole::kExtra, 1, {9}}};
  return m;
}
Journal SampleJournal() {
  Journal j;
  j.manifest = Sample();
  j.renames = {{"m.safetensors." + kIdA, "m.safetensors"},
               {"extra.bin." + kIdB, "extra.bin"}};
  j.removes = {"old.safetensors"};
  return j;
}

// Puts the right checksum under an edited text.
std::string Resealed(std::string text) {
  const size_t at = text.rfind("\"crc32c\": \"");
  const uint32_t crc = Crc32c(0, text.data(), at);
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return text.replace(at + 11, 8, digits);
}
std::string Edited(std::string text, std::string_view from,
                   std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return Resealed(text.replace(at, from.size(), to));
}
ErrorKind Kind(std::string_view text) {
  return ParseManifest(AsBytes(text)).status().kind();
}
ErrorKind JournalKind(const Journal& journal) {
  return ParseJournal(AsBytes(EncodeJournal(journal))).status().kind();
}

void ExpectEqual(const Manifest& a, const Manifest& b) {
  EXPECT_EQ(a.save_id, b.save_id);
  EXPECT_EQ(a.world_size, b.world_size);
  ASSERT_EQ(a.files.size(), b.files.size());
  for (size_t i = 0; i < a.files.size(); ++i) {
    EXPECT_EQ(a.files[i].name, b.files[i].name);
    EXPECT_EQ(a.files[i].id, b.files[i].id);
    EXPECT_EQ(a.files[i].role, b.files[i].role);
    EXPECT_EQ(a.files[i].container, b.files[i].container);
    EXPECT_EQ(a.files[i].bytes, b.files[i].bytes);
    EXPECT_EQ(a.files[i].crc32c, b.files[i].crc32c);
  }
}

TEST(ManifestFormat, GoldenText) {
  Manifest m;
  m.save_id = kIdA;
  m.files = {{"m.safetensors", kIdB, FileRole::kData, 3, {0x1A2B}}};
  EXPECT_EQ(EncodeManifest(m), Resealed("{\n"
                                        "\"format\": \"torch_ckpt\",\n"
                                        "\"version\": 2,\n"
                                        "\"save_id\": \"" +
                                        kIdA +
                                        "\",\n"
                                        "\"world_size\": 1,\n"
                                        "\"segment_bytes\": 1048576,\n"
                                        "\"files\": [\n"
                                        "{\"name\": \"m.safetensors\", "
                                        "\"id\": \"" +
                                        kIdB +
                                        "\", \"role\": \"data\", "
                                        "\"container\": \"safetensors\", "
                                        "\"bytes\": 3, "
                                        "\"crc32c\": \"00001a2b\"}\n"
                                        "],\n"
                                        "\"crc32c\": \"00000000\"\n"
                                        "}\n"));
}

TEST(ManifestFormat, RoundTrip) {
  const std::string text = EncodeManifest(Sample());
  const auto parsed = ParseManifest(AsBytes(text));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  ExpectEqual(*parsed, Sample());
  EXPECT_EQ(EncodeManifest(*parsed), text);
  const FilesByName by_name(parsed->files);
  EXPECT_EQ(by_name.Find("extra.bin"), 5);
  EXPECT_EQ(by_name.Find("empty.safetensors"), 1);
  EXPECT_EQ(by_name.Find("other"), -1);
  Manifest none;
  none.save_id = kIdA;
  EXPECT_EQ(Kind(EncodeManifest(none)), ErrorKind::kOk);
}

TEST(ManifestFormat, ContainersThatAreNotKnown) {
  const std::string text = EncodeManifest(Sample());
  EXPECT_EQ(
      Kind(Edited(text, "\"container\": \"raw\"", "\"container\": \"zip\"")),
      ErrorKind::kUnsupported);
  EXPECT_EQ(Kind(Edited(text, "\"container\": \"raw\"",
                        "\"container\": \"safetensors\"")),
            ErrorKind::kUnsupported);
}

TEST(ManifestFormat, APartSaysWhose) {
  Manifest m = Sample();
  m.part = ManifestPart{3, 4, kIdB, 7};
  const std::string text = EncodeManifest(m);
  EXPECT_NE(text.find("],\n\"part\": {\"rank\": 3, \"world_size\": 4, "
                      "\"run_id\": \"" +
                      kIdB + "\", \"sequence\": 7},\n\"crc32c\""),
            std::string::npos)
      << text;
  const auto parsed = ParseManifest(AsBytes(text));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  ASSERT_TRUE(parsed->part.has_value());
  EXPECT_TRUE(parsed->part->SameSave(*m.part));
  EXPECT_EQ(parsed->part->rank, 3);
  EXPECT_EQ(EncodeManifest(*parsed), text);
  ExpectEqual(*parsed, m);
  struct {
    const char *from, *to;
  } const edits[] = {
      {"\"rank\": 3", "\"rank\": 4"},
      {"\"rank\": 3", "\"rank\": -1"},
      {"\"rank\": 3", "\"rank\": 99999999999"},
      {"\"rank\": 3, ", ""},
      {"\"rank\": 3", "\"rank\": 3, \"rank\": 3"},
      {"\"rank\": 3", "\"rank\": 3, \"new\": 3"},
      {"4, \"run_id", "5, \"run_id"},  // the manifest says 4
      {"\"run_id\": \"bbbb", "\"run_id\": \"BBBB"},
      {"\"run_id\": \"bbbb", "\"run_id\": \"b"},
      {"\"sequence\": 7", "\"sequence\": \"7\""},
      {"\"sequence\": 7", "\"sequence\": [7]"},
      {"\"part\": {\"rank\"", "\"part\": 1, \"x\": {\"rank\""},
  };
  for (const auto& edit : edits) {
    EXPECT_EQ(Kind(Edited(text, edit.from, edit.to)), ErrorKind::kCorrupt)
        << edit.to;
  }
  // Never in a journal, nor as a file of another manifest.
  const std::string journal = EncodeJournal(SampleJournal());
  EXPECT_FALSE(ParseJournal(AsBytes(Edited(journal, "\"renames\"",
                                           "\"part\": {}, \"renames\"")))
                   .ok());
  m.files[5].name = "torch_ckpt-00001-of-00002.json";
  EXPECT_EQ(Kind(EncodeManifest(m)), ErrorKind::kCorrupt);
}

TEST(ManifestFormat, EveryAlteredByteAndEveryCutIsSeen) {
  const std::string text = EncodeManifest(Sample());
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit : {0, 1, 5}) {
      std::string bad = text;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      EXPECT_NE(Kind(bad), ErrorKind::kOk) << i;
    }
    EXPECT_NE(Kind(text.substr(0, i)), ErrorKind::kOk) << i;
  }
  EXPECT_NE(Kind(text + " "), ErrorKind::kOk);
}

// Not even for what a newer version has written: else nobody may replace it.
TEST(ManifestFormat, AnyFlippedBitIsDamage) {
  const std::string texts[] = {EncodeManifest(Sample()),
                               EncodeJournal(SampleJournal())};
  for (const bool journal : {false, true}) {
    std::string text = texts[journal];
    for (size_t i = 0; i < text.size() * 8; ++i) {
      char* const byte = &text[i / 8];
      const char before = *byte;
      *byte = static_cast<char>(*byte ^ (1 << i % 8));
      const Status status = journal ? ParseJournal(AsBytes(text)).status()
                                    : ParseManifest(AsBytes(text)).status();
      EXPECT_EQ(status.kind(), ErrorKind::kCorrupt)
          << "bit " << i % 8 << " of byte " << i / 8 << ": "
          << status.ToString();
      *byte = before;
    }
  }
}

TEST(ManifestFormat, Versions) {
  const std::string text = EncodeManifest(Sample());
  for (const char* version : {"0", "1", "3"}) {
    const auto other = ParseManifest(AsBytes(Edited(
        text, "\"version\": 2", std::string("\"version\": ") + version)));
    EXPECT_EQ(other.status().kind(), ErrorKind::kUnsupported);
    EXPECT_NE(other.status().message().find("written by another torch_ckpt"),
              std::string::npos);
  }
  // Whatever else another version says.
  EXPECT_EQ(Kind("{\"format\":\"torch_ckpt\",\"version\":9,\"x\":[[[[[["),
            ErrorKind::kUnsupported);
  EXPECT_EQ(Kind(Edited(text, "\"torch_ckpt\"", "\"other\"")),
            ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(EncodeJournal(SampleJournal())), ErrorKind::kCorrupt);
  EXPECT_FALSE(ParseJournal(AsBytes(text)).ok());
}

TEST(ManifestFormat, RefusesEdits) {
  const std::string text = EncodeManifest(Sample());
  struct {
    const char *from, *to;
  } const edits[] = {
      {"\"world_size\": 4", "\"world_size\": 0"},
      {"\"world_size\": 4", "\"world_size\": -4"},
      {"\"world_size\": 4", "\"world_size\": 4.0"},
      {"\"world_size\": 4", "\"world_size\": 99999999999"},
      {"\"world_size\": 4", "\"world_size\": \"4\""},
      {"\"world_size\": 4", "\"world_size\": 4, \"new\": 1"},
      {"\"world_size\": 4,\n", ""},
      {"\"world_size\": 4", "\"world_size\": 4, \"world_size\": 4"},
      {"\"format\": \"torch_ckpt\",\n", ""},
      {"\"version\": 2,\n", ""},
      {"\"save_id\": \"aaaa", "\"save_id\": \"AAAA"},
      {"\"save_id\": \"aaaa", "\"save_id\": \"aaa"},
      {"\"name\": \"m.safetensors\"", "\"name\": \"../m.safetensors\""},
      {"\"name\": \"m.safetensors\"", "\"name\": \"m.bin\""},
      {"\"name\": \"m.safetensors\"", "\"name\": \"empty.safetensors\""},
      {"\"name\": \"extra.bin\"", "\"name\": \"torch_ckpt.json\""},
      {"\"name\": \"extra.bin\"", "\"name\": \"commit.json\""},
      {"\"name\": \"extra.bin\"", "\"name\": 7"},
      {"\"name\": \"extra.bin\", ", ""},
      {"\"id\": \"bbbb", "\"id\": \"bbb"},
      {"\"role\": \"extra\"", "\"role\": \"catalog\""},
      {"\"role\": \"extra\"", "\"role\": \"index\""},
      {"\"role\": \"extra\"", "\"role\": \"other\""},
      {"\"bytes\": 5", "\"bytes\": 0"},
      {"\"bytes\": 5", "\"bytes\": 1048577"},
      {"\"bytes\": 5", "\"bytes\": 18446744073709551615"},
      {"\"bytes\": 5", "\"bytes\": 18446744073709551616"},
      {"\"bytes\": 5", "\"bytes\": null"},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": \"FFFFFFFF\""},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": \"fffffff\""},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": \"fffffffg\""},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": \"-fffffff\""},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": \"\""},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": 1"},
      {"\"crc32c\": \"ffffffff\"", "\"crc32c\": [\"ffffffff\"]"},
      {"\"files\": [", "\"files\": [[],"},
      {"\"files\": [", "\"files\": [1,"},
      {"\"files\": [", "\"files\": [{},"},
  };
  for (const auto& e : edits) {
    EXPECT_EQ(Kind(Edited(text, e.from, e.to)), ErrorKind::kCorrupt)
        << e.from << " -> " << e.to;
  }
  EXPECT_EQ(Kind(Edited(text, "1048576,", "8388608,")),
            ErrorKind::kUnsupported);
  EXPECT_EQ(Kind(""), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind("{}"), ErrorKind::kCorrupt);
}

TEST(ManifestFormat, FilesInSubdirectories) {
  Manifest m = Sample();
  m.files[0].name = "a/b/m.safetensors";
  m.files[1].name = "a/empty.safetensors";
  m.files[5].name = "a/b.bin";
  const std::string text = EncodeManifest(m);
  const auto parsed = ParseManifest(AsBytes(text));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  ExpectEqual(*parsed, m);
  const auto with = [&](size_t file, const char* name) {
    Manifest changed = m;
    changed.files[file].name = name;
    return Kind(EncodeManifest(changed));
  };
  EXPECT_EQ(with(5, "c/d/e"), ErrorKind::kOk);
  EXPECT_EQ(with(5, "a/torch_ckpt.json"), ErrorKind::kOk);
  for (const char* name :
       {"a", "a/b", "m/../b", "/b", "a/", "a//c", ".a/c", "a/b/m.safetensors/c",
        "torch_ckpt.json/c", "commit.json/c",
        "torch_ckpt-00001-of-00002.json/c"}) {
    EXPECT_EQ(with(5, name), ErrorKind::kCorrupt) << name;
  }
  EXPECT_EQ(with(3, "a/torch_ckpt.catalog"), ErrorKind::kCorrupt);
  EXPECT_EQ(with(4, "a/model.safetensors.index.json"), ErrorKind::kOk);
}

TEST(ManifestFormat, MetadataIsNamesAndTexts) {
  Manifest m = Sample();
  m.metadata = {{"step", "7"}, {"", "{\"a\": [1, \"\\n\"]}"}, {"\u00fc", ""}};
  const std::string text = EncodeManifest(m);
  const auto parsed = ParseManifest(AsBytes(text));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->metadata, m.metadata);
  EXPECT_EQ(EncodeManifest(*parsed), text);
  m.part = ManifestPart{3, 4, kIdB, 7};
  const auto part = ParseManifest(AsBytes(EncodeManifest(m)));
  ASSERT_TRUE(part.ok()) << part.status().ToString();
  EXPECT_EQ(part->metadata, m.metadata);
  Journal journal = SampleJournal();
  journal.manifest.metadata = m.metadata;
  const auto read = ParseJournal(AsBytes(EncodeJournal(journal)));
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->manifest.metadata, m.metadata);
  EXPECT_EQ(EncodeJournal(*read), EncodeJournal(journal));
  for (const char* to : {"7", "null", "{}", "[\"7\"]", "true"}) {
    EXPECT_EQ(
        Kind(Edited(text, "\"step\": \"7\"", std::string("\"step\": ") + to)),
        ErrorKind::kCorrupt)
        << to;
  }
  EXPECT_EQ(Kind(Edited(text, "\"step\"", "\"\"")), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(Edited(text, "\"metadata\": {", "\"metadata\": 1, \"x\": {")),
            ErrorKind::kCorrupt);
}

TEST(JournalFormat, RoundTrip) {
  const std::string text = EncodeJournal(SampleJournal());
  const auto parsed = ParseJournal(AsBytes(text));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  ExpectEqual(parsed->manifest, Sample());
  ASSERT_EQ(parsed->renames.size(), 2u);
  EXPECT_EQ(parsed->renames[1].from, "extra.bin." + kIdB);
  EXPECT_EQ(parsed->renames[1].to, "extra.bin");
  EXPECT_EQ(parsed->removes, SampleJournal().removes);
  EXPECT_EQ(EncodeJournal(*parsed), text);
}

TEST(JournalFormat, EveryAlteredByteIsSeen) {
  const std::string text = EncodeJournal(SampleJournal());
  for (size_t i = 0; i < text.size(); ++i) {
    std::string bad = text;
    bad[i] = static_cast<char>(bad[i] ^ 2);
    EXPECT_FALSE(ParseJournal(AsBytes(bad)).ok()) << i;
  }
}

TEST(JournalFormat, RefusesAReplayThatDoesHarm) {
  EXPECT_EQ(JournalKind(SampleJournal()), ErrorKind::kOk);
  const auto with = [](auto change) {
    Journal j = SampleJournal();
    change(&j);
    return JournalKind(j);
  };
  const ErrorKind kBad = ErrorKind::kCorrupt;
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("a/old.bin"); }),
            ErrorKind::kOk);
  for (const char* stocks : {".metadata", "__0.metadata", "__12.metadata"}) {
    EXPECT_EQ(with([&](Journal* j) { j->removes.push_back(stocks); }),
              ErrorKind::kOk)
        << stocks;
  }
  for (const char* other : {".metadata2", "a/.metadata", ".x"}) {
    EXPECT_EQ(with([&](Journal* j) { j->removes.push_back(other); }), kBad)
        << other;
  }
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("a/../x"); }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->renames[1].from = "a/b"; }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("m.safetensors"); }),
            kBad);
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("torch_ckpt.json"); }),
            kBad);
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("../x"); }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->removes.push_back("old.safetensors"); }),
            kBad);
  EXPECT_EQ(with([](Journal* j) { j->renames[0].to = "config.json"; }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->renames[0].to = "extra.bin"; }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->renames[0].from = "a/b"; }), kBad);
  EXPECT_EQ(with([](Journal* j) { j->renames[0].from = j->renames[1].from; }),
            kBad);
}

}  // namespace
}  // namespace torch_ckpt
