#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "format/ours/catalog.h"
#include "format/ours/catalog_builder.h"
#include "format/ours/catalog_codec.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

const std::string kId(32, 'c');

std::vector<ManifestFile> Files() {
  return {{"a.safetensors", kId, FileRole::kData, 1000, {}},
          {"b.safetensors", "", FileRole::kData, 4096, {}},
          {"objects-00001.json", kId, FileRole::kObjects, 10, {}}};
}

Placement At(uint32_t file, uint64_t offset, Box box,
             PlacementRole role = PlacementRole::kOwner) {
  Placement p;
  p.file = file;
  p.role = role;
  p.offset = offset;
  p.box = std::move(box);
  return p;
}
Placement Strided(uint32_t file, uint64_t offset, Box box, Dims strides) {
  Placement p = At(file, offset, std::move(box));
  p.kind = PlacementKind::kStridedBox;
  p.strides = strides;
  return p;
}
Placement Range(uint32_t file, uint64_t offset, int64_t begin, int64_t end) {
  Placement p = At(file, offset, {});
  p.kind = PlacementKind::kRange;
  p.begin = begin;
  p.end = end;
  return p;
}

CatalogBuilder Sample() {
  CatalogBuilder b;
  const uint32_t w = *b.AddTensor("w", Dtype::kBF16, {4, 6});
  b.SetPath(w, "[\"m\",0]");
  EXPECT_TRUE(b.AddPlacement(w, At(0, 8, {{0, 0}, {2, 6}})).ok());
  EXPECT_TRUE(
      b.AddPlacement(w, At(1, 300, {{2, 0}, {2, 6}}, PlacementRole::kReplica))
          .ok());
  EXPECT_TRUE(
      b.AddPlacement(w, Strided(1, 400, {{2, 0}, {2, 6}}, {2, 4})).ok());
  EXPECT_TRUE(b.AddPlacement(w, Range(0, 100, 7, 20)).ok());
  const uint32_t s = *b.AddTensor("s", Dtype::kI64, {});
  EXPECT_TRUE(b.AddPlacement(s, At(1, 4088, {})).ok());
  EXPECT_TRUE(b.AddAlias("t", "w").ok());
  const uint32_t o = *b.AddObject(std::string("o\0", 2), 2);
  b.SetPath(o, R"(["\u0000\"",-1,""])");
  return b;
}

std::string Sealed(std::string body) {
  const uint32_t crc = Crc32c(0, body.data(), body.size());
  char raw[4];
  std::memcpy(raw, &crc, 4);
  return body.append(raw, 4);
}

// As readers take it: all of it is looked at.
Status ReadAll(const std::string& bytes,
               const std::vector<ManifestFile>& files = Files()) {
  const auto catalog = Catalog::Parse(bytes, files);
  if (!catalog.ok()) return catalog.status();
  for (uint32_t e = 0; e < catalog->entries().size(); ++e) {
    const Status placements = catalog->Placements(e, files).status();
    if (!placements.ok()) return placements;
  }
  return {};
}
ErrorKind Kind(const std::string& bytes) { return ReadAll(bytes).kind(); }
ErrorKind Kind(const CatalogBuilder& b) { return Kind(*b.Encode()); }

// The same content once more, from what is read.
std::string Rebuilt(const Catalog& c, const std::vector<ManifestFile>& files) {
  const auto again = c.Renamed({}, files);
  EXPECT_TRUE(again.ok()) << again.status().ToString();
  return again.ok() ? std::string(again->bytes()) : std::string();
}

TEST(CatalogBuilder, FindsAndRefuses) {
  CatalogBuilder b = Sample();
  EXPECT_EQ(b.Find("w"), 0);
  EXPECT_EQ(b.Find(std::string_view("o\0", 2)), 3);
  EXPECT_EQ(b.Find("x"), -1);
  const Status twin = b.AddTensor("w", Dtype::kU8, {}).status();
  EXPECT_EQ(twin.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(twin.tensor(), "w");
  EXPECT_EQ(b.size(), 4u);
  const Status outside = b.AddPlacement(0, At(0, 0, {{3, 0}, {2, 6}}));
  EXPECT_EQ(outside.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(outside.tensor(), "w");
  EXPECT_FALSE(b.AddPlacement(0, At(0, 0, {})).ok());
}

TEST(Catalog, ReadsWhatWasBuilt) {
  const auto files = Files();
  const std::string bytes = *Sample().Encode();
  EXPECT_TRUE(bytes.starts_with("TCKPTCAT\x02"));
  const auto c = Catalog::Parse(bytes, files);
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  ASSERT_EQ(c->entries().size(), 4u);  // o, s, t, w
  EXPECT_EQ(c->Find(std::string_view("o\0", 2)), 0);
  EXPECT_EQ(c->Find("t"), 2);
  EXPECT_EQ(c->Find("w"), 3);
  EXPECT_EQ(c->Find("u"), -1);
  EXPECT_EQ(c->entries()[0].kind, EntryKind::kObject);
  EXPECT_EQ(c->entries()[0].file, 2u);
  EXPECT_EQ(c->entries()[0].path, R"(["\u0000\"",-1,""])");
  EXPECT_EQ(c->entries()[1].shape, Dims{});
  EXPECT_EQ(c->entries()[2].alias_of, "w");
  EXPECT_EQ(c->entries()[2].dtype, Dtype::kBF16);
  EXPECT_EQ(c->entries()[3].path, "[\"m\",0]");
  const CatalogBuilder built = Sample();
  EXPECT_EQ(*c->Placements(3, files), *built.Placements(0));
  EXPECT_EQ(*c->Placements(2, files), *built.Placements(0));
  EXPECT_EQ(*c->Placements(1, files), *built.Placements(1));
  EXPECT_TRUE(c->Placements(0, files)->empty());
  EXPECT_EQ(Rebuilt(*c, files), bytes);
  EXPECT_EQ(Kind(CatalogBuilder()), ErrorKind::kOk);
}

TEST(Catalog, Renamed) {
  const auto files = Files();
  const Catalog c = *Catalog::Parse(*Sample().Encode(), files);
  const auto swapped =
      c.Renamed({{"w", "t"}, {"t", "w"}, {"none", "s"}}, files);
  ASSERT_TRUE(swapped.ok()) << swapped.status().ToString();
  const auto t = static_cast<uint32_t>(swapped->Find("t"));
  const auto w = static_cast<uint32_t>(swapped->Find("w"));
  EXPECT_EQ(swapped->entries()[t].path, "");
  EXPECT_EQ(swapped->entries()[w].alias_of, "t");
  EXPECT_EQ(swapped->entries()[0].path, c.entries()[0].path);
  EXPECT_EQ(*swapped->Placements(w, files), *c.Placements(3, files));
  const Status taken = c.Renamed({{"w", "s"}}, files).status();
  EXPECT_EQ(taken.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(taken.tensor(), "s");
}

TEST(CatalogFile, GoldenBytes) {
  CatalogBuilder b;
  const uint32_t w = *b.AddTensor("w", Dtype::kF32, {2, 1});
  b.SetPath(w, "[0]");
  ASSERT_TRUE(b.AddPlacement(w, At(0, 0, {{1, 0}, {1, 1}})).ok());
  ASSERT_TRUE(
      b.AddPlacement(w, At(1, 128, Box::Whole({2, 1}), PlacementRole::kReplica))
          .ok());
  ASSERT_TRUE(b.AddPlacement(w, Strided(0, 2, {{0, 0}, {2, 1}}, {8, 4})).ok());
  ASSERT_TRUE(b.AddPlacement(w, Range(0, 3, 1, 2)).ok());
  ASSERT_TRUE(b.AddAlias("v", "w").ok());
  ASSERT_TRUE(b.AddObject("o", 2).ok());
  const char body[] =
      "TCKPTCAT\x02"
      "\x03\x00\x00\x00"  // three entries
      "\x00\x00\x00\x00\x05\x00\x00\x00\x0b\x00\x00\x00"
      "\x02\x01o\x00\x02"                     // object o in file 2
      "\x01\x01v\x00\x01w"                    // alias v of w
      "\x00\x01w\x02\x03[0]\x00"              // tensor w, its path
      "\x11\x02\x02\x01\x04"                  // F32 (2, 1), 4 placements
      "\x04\x00\x00\x01\x00\x01\x01"          // owner, box
      "\x01\x01\x80\x01"                      // replica, whole
      "\x08\x00\x02\x00\x00\x02\x01\x08\x04"  // strided box
      "\x0c\x00\x03\x01\x01";                 // range
  EXPECT_EQ(*b.Encode(), Sealed(std::string(body, sizeof body - 1)));
  EXPECT_EQ(Kind(b), ErrorKind::kOk);
}

TEST(CatalogFile, EveryCutAndEveryBitIsSeen) {
  const auto files = Files();
  const std::string bytes = *Sample().Encode();
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_NE(Kind(bytes.substr(0, i)), ErrorKind::kOk);
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = bytes;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      EXPECT_NE(Kind(bad), ErrorKind::kOk) << i;
    }
  }
  // The same with a right checksum: never a crash, and every cut is seen.
  const std::string body = bytes.substr(0, bytes.size() - 4);
  for (size_t i = 0; i < body.size(); ++i) {
    EXPECT_NE(Kind(Sealed(body.substr(0, i))), ErrorKind::kOk);
    for (int value : {0, 1, 0x7f, 0x80, 0xff}) {
      std::string bad = body;
      bad[i] = static_cast<char>(value);
      if (!ReadAll(Sealed(bad)).ok()) continue;
      // What is taken is one catalog in its only spelling.
      const auto c = Catalog::Parse(Sealed(bad), files);
      EXPECT_EQ(Rebuilt(*c, files), Sealed(bad)) << i;
    }
  }
  EXPECT_NE(Kind(Sealed(body + '\0')), ErrorKind::kOk);
}

TEST(CatalogFile, CountsAreBoundedByTheBytes) {
  const std::string head = "TCKPTCAT\x02";
  EXPECT_EQ(Kind(Sealed(head)), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(Sealed(head + "\xff\xff\xff\xff")), ErrorKind::kCorrupt);
  // A tensor of as many placements as a number can say.
  const std::string zero(4, '\0');
  const std::string one("\x01\x00\x00\x00", 4);
  const std::string tensor("\x00\x01w\x00\x04\x00", 6);
  EXPECT_EQ(Kind(Sealed(head + one + zero + tensor + '\0')), ErrorKind::kOk);
  EXPECT_EQ(Kind(Sealed(head + one + zero + tensor +
                        "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")),
            ErrorKind::kCorrupt);
}

TEST(CatalogFile, Versions) {
  std::string body = *Sample().Encode();
  body.resize(body.size() - 4);
  for (const char version : {'\0', '\1', '\3', '\177'}) {
    body[8] = version;
    EXPECT_EQ(Kind(Sealed(body)), ErrorKind::kUnsupported);
  }
}

// One entry, "w", with `fields` and one placement.
std::string OneEntry(const std::string& fields, const std::string& placement) {
  return Sealed(
      std::string("TCKPTCAT\x02\x01\x00\x00\x00\x00\x00\x00\x00", 17) +
      std::string("\x00\x01w", 3) + fields +
      std::string("\x04\x01\x02\x01", 4) + placement);
}

TEST(CatalogFile, FieldsThatAreNotKnown) {
  const std::string none(1, '\0'), whole("\x00\x00\x00", 3);
  EXPECT_EQ(Kind(OneEntry(none, whole)), ErrorKind::kOk);
  // Number 3, of three bytes: passed over, unless it is critical.
  EXPECT_EQ(Kind(OneEntry("\x06\x03xyz" + none, whole)), ErrorKind::kOk);
  const Status refused = ReadAll(OneEntry("\x07\x03xyz" + none, whole));
  EXPECT_EQ(refused.kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(refused.tensor(), "w");
  // Of a placement likewise; a bit says that it has any.
  const std::string place("\x02\x00\x00", 3);
  EXPECT_EQ(Kind(OneEntry(none, place + "\x02\x01h" + none)), ErrorKind::kOk);
  const Status critical = ReadAll(OneEntry(none, place + "\x03\x01h" + none));
  EXPECT_EQ(critical.kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(critical.tensor(), "w");
  for (const std::string& fields :
       {"\x04\x01x\x04\x01x" + none, std::string("\x01\x01x") + none,
        "\x04\x01x\x02\x01x" + none, std::string("\x04\x7fx") + none}) {
    EXPECT_EQ(Kind(OneEntry(fields, whole)), ErrorKind::kCorrupt);
    EXPECT_EQ(Kind(OneEntry(none, place + fields)), ErrorKind::kCorrupt);
  }
  EXPECT_EQ(Kind(OneEntry(none, place + none)), ErrorKind::kCorrupt);
}

TEST(CatalogFile, KindsThatAreToCome) {
  const std::string none(1, '\0');
  for (const char head : {'\x10', '\x14', '\x1c'}) {
    const Status refused = ReadAll(OneEntry(none, std::string{head, 0, 0, 0}));
    EXPECT_EQ(refused.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(refused.tensor(), "w");
  }
}

TEST(CatalogFile, RefusesWhatCannotBe) {
  const ErrorKind kBad = ErrorKind::kCorrupt;
  const auto with = [](Dtype dtype, const Dims& shape, const Placement& p) {
    CatalogBuilder b;
    const uint32_t w = *b.AddTensor("w", dtype, shape);
    b.SetPlacements(w, {&p, 1});
    return Kind(b);
  };
  const Box all{{0}, {60}};
  EXPECT_EQ(with(Dtype::kU8, {60}, At(0, 940, all)), ErrorKind::kOk);
  EXPECT_EQ(with(Dtype::kU8, {60}, At(0, 941, all)), kBad);
  EXPECT_EQ(with(Dtype::kU8, {60}, At(0, UINT64_MAX, all)), kBad);
  EXPECT_EQ(with(Dtype::kU8, {60}, At(2, 0, all)), kBad);  // of objects
  EXPECT_EQ(with(Dtype::kU8, {60}, At(3, 0, all)), kBad);
  EXPECT_EQ(with(Dtype::kU8, {60}, At(0, 0, {{1}, {60}})), kBad);
  EXPECT_EQ(with(Dtype::kF4, {6}, At(0, 0, {{0}, {3}})), kBad);
  // Strides: the last byte is what counts.
  EXPECT_EQ(with(Dtype::kU8, {60}, Strided(0, 0, all, {16})), ErrorKind::kOk);
  EXPECT_EQ(with(Dtype::kU8, {60}, Strided(0, 56, all, {16})), kBad);
  EXPECT_EQ(with(Dtype::kU8, {60}, Strided(0, 0, all, {0})), ErrorKind::kOk);
  EXPECT_EQ(with(Dtype::kU8, {60}, Strided(0, 0, all, {int64_t{1} << 47})),
            kBad);
  // Ranges are of elements, and of whole bytes.
  EXPECT_EQ(with(Dtype::kI64, {5, 25}, Range(0, 0, 0, 125)), ErrorKind::kOk);
  EXPECT_EQ(with(Dtype::kI64, {5, 25}, Range(0, 8, 0, 125)), kBad);
  EXPECT_EQ(with(Dtype::kI64, {5, 25}, Range(0, 0, 100, 126)), kBad);
  EXPECT_EQ(with(Dtype::kF4, {8}, Range(0, 0, 2, 6)), ErrorKind::kOk);
  EXPECT_EQ(with(Dtype::kF4, {8}, Range(0, 0, 2, 5)), kBad);
  EXPECT_EQ(with(Dtype::kF4, {8}, Range(0, 0, 1, 5)), kBad);
  const auto tensor = [](std::string name, Dtype dtype, const Dims& shape) {
    CatalogBuilder b;
    EXPECT_TRUE(b.AddTensor(std::move(name), dtype, shape).ok());
    return Kind(b);
  };
  EXPECT_EQ(tensor("\xFF", Dtype::kU8, {}), kBad);
  EXPECT_EQ(tensor(std::string("a\0", 2), Dtype::kU8, {}), kBad);
  EXPECT_EQ(tensor("__metadata__", Dtype::kU8, {}), kBad);
  EXPECT_EQ(tensor("x", Dtype::kF4, {3}), kBad);
  EXPECT_EQ(tensor("x", Dtype::kU8, {int64_t{1} << 48}), kBad);
  for (const char* target : {"a", "nobody", "o"}) {
    CatalogBuilder b = Sample();
    EXPECT_TRUE(b.AddAlias("a", target).ok());
    EXPECT_EQ(Kind(b), kBad) << target;
  }
  for (const uint32_t file : {0u, 3u}) {
    CatalogBuilder b;
    EXPECT_TRUE(b.AddObject("o", file).ok());
    EXPECT_EQ(Kind(b), kBad);
  }
}

// Whoever reads it searches by name.
TEST(CatalogFile, NamesAscend) {
  const std::string none(1, '\0');
  const std::string a(
      "\x00\x01"
      "a\x00\x04\x00\x00",
      7),
      b("\x00\x01"
        "b\x00\x04\x00\x00",
        7);
  const auto file = [&](const std::string& first, const std::string& second) {
    return Sealed(std::string("TCKPTCAT\x02\x02\x00\x00\x00", 13) +
                  std::string("\x00\x00\x00\x00\x07\x00\x00\x00", 8) + first +
                  second);
  };
  EXPECT_EQ(Kind(file(a, b)), ErrorKind::kOk);
  EXPECT_EQ(Kind(file(b, a)), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(file(a, a)), ErrorKind::kCorrupt);
}

TEST(CatalogFile, PathsAreArraysOfStringsAndIntegers) {
  const auto kind = [](const std::string& path) {
    CatalogBuilder b;
    b.SetPath(*b.AddTensor("w", Dtype::kU8, {0}), path);
    return Kind(b);
  };
  for (const char* good :
       {R"([""])", R"([0])", R"(["a",0,-12,"b c"])", R"(["\u00e9\\\"],["])",
        "[\"\xC3\xA9\"]", "[9223372036854775807]"}) {
    EXPECT_EQ(kind(good), ErrorKind::kOk) << good;
  }
  for (const char* bad : {"[",           "]",
                          "[]",          "[1",
                          "[1,]",        "[,1]",
                          "[1]]",        "[[1]]",
                          "5",           "null",
                          "[01]",        "[-]",
                          "[1.0]",       "[ 1]",
                          "[true]",      R"(["a)",
                          R"(["a\)",     R"(["\x"])",
                          R"(["\u12"])", R"(["a"],["b"])",
                          "[\"\n\"]",    "[12345678901234567890]",
                          "[\"\xFF\"]",  R"([{"a":1}])"}) {
    EXPECT_EQ(kind(bad), ErrorKind::kCorrupt) << bad;
  }
}

TEST(CatalogFile, RandomCatalogsComeBack) {
  std::mt19937_64 random(3);
  const auto below = [&](uint64_t n) { return random() % n; };
  std::vector<ManifestFile> files;
  for (int f = 0; f < 3; ++f) {
    files.push_back(
        {"f" + std::to_string(f), kId, FileRole::kData, uint64_t{1} << 40, {}});
  }
  for (int round = 0; round < 100; ++round) {
    CatalogBuilder b;
    for (uint32_t i = 0; i < 50; ++i) {
      Dims shape;
      for (uint64_t d = below(kMaxDims + 1); d-- > 0;)
        shape.push_back(static_cast<int64_t>(below(5)));
      ASSERT_TRUE(
          b.AddTensor("t" + std::to_string(i), Dtype::kF16, shape).ok());
      const uint64_t placements = below(4);
      for (uint64_t k = 0; k < placements; ++k) {
        Placement p;
        p.file = static_cast<uint32_t>(below(3));
        if (k > 0) p.role = static_cast<PlacementRole>(below(2));
        p.kind = static_cast<PlacementKind>(below(3));
        p.offset = below(uint64_t{1} << 39);
        if (p.kind == PlacementKind::kRange) {
          const auto count = static_cast<uint64_t>(shape.Product());
          p.begin = static_cast<int64_t>(below(count + 1));
          p.end = p.begin + static_cast<int64_t>(below(
                                count - static_cast<uint64_t>(p.begin) + 1));
        } else {
          for (int64_t n : shape) {
            const auto begin =
                static_cast<int64_t>(below(static_cast<uint64_t>(n) + 1));
            p.box.offsets.push_back(begin);
            p.box.sizes.push_back(static_cast<int64_t>(
                below(static_cast<uint64_t>(n - begin) + 1)));
          }
        }
        if (p.kind == PlacementKind::kStridedBox) {
          for (int d = 0; d < shape.size(); ++d)
            p.strides.push_back(static_cast<int64_t>(below(100)));
        }
        ASSERT_TRUE(b.AddPlacement(i, p).ok());
      }
    }
    const auto c = Catalog::Parse(*b.Encode(), files);
    ASSERT_TRUE(c.ok()) << c.status().ToString();
    for (uint32_t i = 0; i < b.size(); ++i) {
      const auto at = static_cast<uint32_t>(c->Find(b.entry(i).name));
      EXPECT_EQ(c->entries()[at].shape, b.entry(i).shape);
      EXPECT_EQ(*c->Placements(at, files), *b.Placements(i));
    }
    EXPECT_EQ(Rebuilt(*c, files), *b.Encode());
  }
}

}  // namespace
}  // namespace torch_ckpt
