#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "format/catalog.h"
#include "runtime/crc32c.h"

namespace torch_ckpt {
namespace {

const std::string kId(32, 'c');

CatalogEntry Tensor(std::string name, Dtype dtype, Dims shape) {
  CatalogEntry e;
  e.name = std::move(name);
  e.storage_dtype = e.logical_dtype = dtype;
  e.shape = shape;
  return e;
}

Catalog Sample() {
  Catalog c;
  c.AddFile({"a.safetensors", kId, 1000});
  c.AddFile({"b.safetensors", "", 4096});
  CatalogEntry w = Tensor("w", Dtype::kBF16, {4, 6});
  w.logical_dtype = Dtype::kF32;
  w.path = "[\"m\",0]";
  EXPECT_TRUE(c.AddEntry(w).ok());
  EXPECT_TRUE(
      c.AddPlacement(0, {0, PlacementRole::kOwner, 8, {{0, 0}, {2, 6}}}).ok());
  EXPECT_TRUE(
      c.AddPlacement(0, {1, PlacementRole::kReplica, 300, {{2, 0}, {2, 6}}})
          .ok());
  EXPECT_TRUE(c.AddEntry(Tensor("s", Dtype::kI64, {})).ok());
  EXPECT_TRUE(c.AddPlacement(1, {1, PlacementRole::kOwner, 4088, {}}).ok());
  CatalogEntry alias = Tensor("t", Dtype::kBF16, {4, 6});
  alias.kind = EntryKind::kAlias;
  alias.logical_dtype = Dtype::kF32;
  alias.alias_of = "w";
  EXPECT_TRUE(c.AddEntry(alias).ok());
  CatalogEntry object = Tensor("o", Dtype::kU8, {});
  object.kind = EntryKind::kObject;
  object.name = std::string("o\0", 2);
  object.path = R"(["\u0000\"",-1,""])";
  EXPECT_TRUE(c.AddEntry(object).ok());
  EXPECT_TRUE(c.AddPlacement(3, {0, PlacementRole::kOwner, 0, {}}).ok());
  EXPECT_TRUE(c.LinkAliases().ok());
  return c;
}

std::string Sealed(std::string body) {
  const uint32_t crc = Crc32c(0, body.data(), body.size());
  char raw[4];
  std::memcpy(raw, &crc, 4);
  return body.append(raw, 4);
}
ErrorKind Kind(std::string_view bytes) {
  return DecodeCatalog(AsBytes(bytes)).status().kind();
}
// Decodes the encoding of a catalog that was built without checks.
ErrorKind RoundKind(const Catalog& c) { return Kind(EncodeCatalog(c)); }

void ExpectEqual(const Catalog& a, const Catalog& b) {
  ASSERT_EQ(a.files().size(), b.files().size());
  for (size_t i = 0; i < a.files().size(); ++i) {
    EXPECT_EQ(a.files()[i].name, b.files()[i].name);
    EXPECT_EQ(a.files()[i].id, b.files()[i].id);
    EXPECT_EQ(a.files()[i].bytes, b.files()[i].bytes);
  }
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (uint32_t i = 0; i < a.entries().size(); ++i) {
    const CatalogEntry &x = a.entries()[i], &y = b.entries()[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.kind, y.kind);
    EXPECT_EQ(x.storage_dtype, y.storage_dtype);
    EXPECT_EQ(x.logical_dtype, y.logical_dtype);
    EXPECT_EQ(x.fill, y.fill);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.alias_of, y.alias_of);
    EXPECT_EQ(x.path, y.path);
    ASSERT_EQ(a.placements(i).size(), b.placements(i).size());
    for (size_t k = 0; k < a.placements(i).size(); ++k) {
      const Placement &p = a.placements(i)[k], &q = b.placements(i)[k];
      EXPECT_EQ(p.file, q.file);
      EXPECT_EQ(p.role, q.role);
      EXPECT_EQ(p.offset, q.offset);
      EXPECT_EQ(p.box, q.box);
    }
  }
}

TEST(Catalog, FindsAndRefuses) {
  Catalog c = Sample();
  EXPECT_EQ(c.Find("w"), 0);
  EXPECT_EQ(c.Find(std::string_view("o\0", 2)), 3);
  EXPECT_EQ(c.Find("x"), -1);
  EXPECT_FALSE(c.AddEntry(Tensor("w", Dtype::kU8, {})).ok());
  EXPECT_EQ(c.entries().size(), 4u);
  const Status outside =
      c.AddPlacement(0, {0, PlacementRole::kOwner, 0, {{3, 0}, {2, 6}}});
  EXPECT_EQ(outside.kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(outside.tensor(), "w");
  EXPECT_FALSE(c.AddPlacement(0, {0, PlacementRole::kOwner, 0, {}}).ok());
}

TEST(Catalog, Renamed) {
  const Catalog c = Sample();
  const auto swapped = c.Renamed({{"w", "t"}, {"t", "w"}, {"none", "s"}});
  ASSERT_TRUE(swapped.ok()) << swapped.status().ToString();
  EXPECT_EQ(swapped->Find("t"), 0);
  EXPECT_EQ(swapped->entries()[0].path, "");
  EXPECT_EQ(swapped->entries()[2].alias_of, "t");
  EXPECT_EQ(swapped->entries()[3].path, c.entries()[3].path);
  ASSERT_EQ(swapped->placements(2).size(), 2u);
  EXPECT_EQ(swapped->placements(2)[1].offset, 300u);
  ExpectEqual(c, c.Renamed({}).value());
  const Status taken = c.Renamed({{"w", "s"}}).status();
  EXPECT_EQ(taken.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(taken.tensor(), "s");
}

TEST(CatalogFile, RoundTrip) {
  const Catalog c = Sample();
  const std::string bytes = EncodeCatalog(c);
  EXPECT_TRUE(bytes.starts_with("TCKPTCAT\x01"));
  const auto decoded = DecodeCatalog(AsBytes(bytes));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  ExpectEqual(c, *decoded);
  EXPECT_EQ(decoded->Find("t"), 2);
  EXPECT_EQ(EncodeCatalog(*decoded), bytes);
  EXPECT_EQ(RoundKind(Catalog()), ErrorKind::kOk);
}

TEST(CatalogFile, GoldenBytes) {
  Catalog c;
  c.AddFile({"f", "", 300});
  ASSERT_TRUE(c.AddEntry(Tensor("w", Dtype::kF32, {2, 1})).ok());
  ASSERT_TRUE(
      c.AddPlacement(0, {0, PlacementRole::kOwner, 0, {{1, 0}, {1, 1}}}).ok());
  ASSERT_TRUE(
      c.AddPlacement(0, {0, PlacementRole::kReplica, 128, Box::Whole({2, 1})})
          .ok());
  const char body[] =
      "TCKPTCAT\x01"
      "\x01\x01"
      "f\x00\xAC\x02"                      // file f, no id, 300 bytes
      "\x01"                               // one entry
      "\x00\x01w\x11\x11\x00\x02\x02\x01"  // tensor w, F32 (2, 1)
      "\x00\x00\x02"                       // no alias, no path, two placements
      "\x00\x00\x00\x01\x00\x01\x01"       // owner, box
      "\x03\x00\x80\x01";                  // replica, whole
  EXPECT_EQ(EncodeCatalog(c), Sealed(std::string(body, sizeof body - 1)));
}

TEST(CatalogFile, EveryCutAndEveryBitIsSeen) {
  const std::string bytes = EncodeCatalog(Sample());
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
      const auto decoded = DecodeCatalog(AsBytes(Sealed(bad)));
      // What is taken is one catalog in its only spelling.
      if (!decoded.ok()) continue;
      EXPECT_EQ(EncodeCatalog(*decoded), Sealed(bad));
    }
  }
  EXPECT_NE(Kind(Sealed(body + '\0')), ErrorKind::kOk);
}

TEST(CatalogFile, CountsAreBoundedByTheBytes) {
  const std::string head = "TCKPTCAT\x01";
  const std::string huge = "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01";
  EXPECT_EQ(Kind(Sealed(head + huge)), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(Sealed(head + "\x01" + huge)), ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(Sealed(head + std::string("\0", 1) + huge)),
            ErrorKind::kCorrupt);
  // Longer than needed, and longer than 64 bits.
  EXPECT_EQ(Kind(Sealed(head + std::string("\x80\x00\x00", 3))),
            ErrorKind::kCorrupt);
  EXPECT_EQ(Kind(Sealed(head + std::string(11, '\x80'))), ErrorKind::kCorrupt);
}

TEST(CatalogFile, Versions) {
  std::string body = EncodeCatalog(Sample());
  body.resize(body.size() - 4);
  body[8] = 2;
  EXPECT_EQ(Kind(Sealed(body)), ErrorKind::kUnsupported);
  body[8] = 0;
  EXPECT_EQ(Kind(Sealed(body)), ErrorKind::kCorrupt);
}

TEST(CatalogFile, RefusesWhatCannotBe) {
  const auto with = [](auto change) {
    Catalog c;
    c.AddFile({"a.safetensors", kId, 100});
    change(&c);
    return RoundKind(c);
  };
  const auto add = [](Catalog* c, CatalogEntry e, const Placement& p) {
    const auto id = c->AddEntry(std::move(e));
    ASSERT_TRUE(id.ok());
    ASSERT_TRUE(c->AddPlacement(*id, p).ok());
  };
  const ErrorKind kBad = ErrorKind::kCorrupt;
  const CatalogEntry w = Tensor("w", Dtype::kU8, {60});
  EXPECT_EQ(with([&](Catalog* c) { add(c, w, {0, {}, 40, {{0}, {60}}}); }),
            ErrorKind::kOk);
  EXPECT_EQ(with([&](Catalog* c) { add(c, w, {0, {}, 41, {{0}, {60}}}); }),
            kBad);
  EXPECT_EQ(
      with([&](Catalog* c) { add(c, w, {0, {}, UINT64_MAX, {{0}, {60}}}); }),
      kBad);
  EXPECT_EQ(with([&](Catalog* c) { add(c, w, {1, {}, 0, {{0}, {60}}}); }),
            kBad);
  EXPECT_EQ(with([&](Catalog* c) {
              add(c, Tensor("f", Dtype::kF4, {6}), {0, {}, 0, {{0}, {3}}});
            }),
            kBad);
  EXPECT_EQ(with([](Catalog* c) { c->AddFile({"../x", "", 1}); }), kBad);
  EXPECT_EQ(with([](Catalog* c) { c->AddFile({"x", "id", 1}); }), kBad);
  EXPECT_EQ(with([](Catalog* c) { c->AddFile({"a.safetensors", "", 1}); }),
            kBad);
  const auto entry = [&](CatalogEntry e) {
    return with([&](Catalog* c) { ASSERT_TRUE(c->AddEntry(e).ok()); });
  };
  CatalogEntry alias = w;
  alias.alias_of = "w";
  EXPECT_EQ(entry(alias), kBad);  // a tensor with a target
  alias.kind = EntryKind::kAlias;
  EXPECT_EQ(entry(alias), kBad);  // of itself
  alias.alias_of = "nobody";
  EXPECT_EQ(entry(alias), kBad);
  // Of a tensor that is not like it.
  for (CatalogEntry e :
       {Tensor("x", Dtype::kF64, w.shape), Tensor("x", w.storage_dtype, {1})}) {
    e.kind = EntryKind::kAlias;
    e.alias_of = "w";
    EXPECT_EQ(entry(e), kBad);
  }
  EXPECT_EQ(entry(Tensor("\xFF", Dtype::kU8, {})), kBad);
  EXPECT_EQ(entry(Tensor(std::string("a\0", 2), Dtype::kU8, {})), kBad);
  EXPECT_EQ(entry(Tensor("__metadata__", Dtype::kU8, {})), kBad);
  EXPECT_EQ(entry(Tensor("x", Dtype::kF4, {3})), kBad);
  EXPECT_EQ(entry(Tensor("x", Dtype::kU8, {int64_t{1} << 48})), kBad);
}

// Only what readers rely on: one owner, no shape.
TEST(CatalogFile, RefusesObjectsThatAreNowhereOrTwice) {
  CatalogEntry object = Tensor("o", Dtype::kU8, {});
  object.kind = EntryKind::kObject;
  const auto kind = [&](const std::vector<PlacementRole>& roles) {
    Catalog c;
    c.AddFile({"objects.json", kId, 100});
    const auto id = c.AddEntry(object);
    EXPECT_TRUE(id.ok());
    for (const PlacementRole role : roles) {
      const Box box = Box::Whole(object.shape);
      EXPECT_TRUE(c.AddPlacement(*id, {0, role, 0, box}).ok());
    }
    return RoundKind(c);
  };
  const auto owner = PlacementRole::kOwner, replica = PlacementRole::kReplica;
  EXPECT_EQ(kind({owner}), ErrorKind::kOk);
  EXPECT_EQ(kind({}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind({replica}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind({owner, replica}), ErrorKind::kCorrupt);
  object.shape = {1};
  EXPECT_EQ(kind({owner}), ErrorKind::kCorrupt);
}

TEST(CatalogFile, PathsAreArraysOfStringsAndIntegers) {
  const auto kind = [](const std::string& path) {
    Catalog c;
    CatalogEntry e = Tensor("w", Dtype::kU8, {0});
    e.path = path;
    EXPECT_TRUE(c.AddEntry(e).ok());
    return RoundKind(c);
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
                          R"([{"a":1}])"}) {
    EXPECT_EQ(kind(bad), ErrorKind::kCorrupt) << bad;
  }
}

TEST(CatalogFile, RandomCatalogsComeBack) {
  std::mt19937_64 random(3);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 100; ++round) {
    Catalog c;
    for (uint32_t f = 0; f < 3; ++f)
      c.AddFile({"f" + std::to_string(f), kId, uint64_t{1} << 40});
    for (uint32_t i = 0; i < 50; ++i) {
      Dims shape;
      for (uint64_t d = below(kMaxDims + 1); d-- > 0;)
        shape.push_back(static_cast<int64_t>(below(5)));
      ASSERT_TRUE(
          c.AddEntry(Tensor("t" + std::to_string(i), Dtype::kF16, shape)).ok());
      for (uint64_t k = below(4); k-- > 0;) {
        Placement p;
        p.file = static_cast<uint32_t>(below(3));
        p.role = static_cast<PlacementRole>(below(2));
        p.offset = below(uint64_t{1} << 39);
        for (int64_t n : shape) {
          const auto begin =
              static_cast<int64_t>(below(static_cast<uint64_t>(n) + 1));
          p.box.offsets.push_back(begin);
          p.box.sizes.push_back(static_cast<int64_t>(
              below(static_cast<uint64_t>(n - begin) + 1)));
        }
        ASSERT_TRUE(c.AddPlacement(i, p).ok());
      }
    }
    const auto decoded = DecodeCatalog(AsBytes(EncodeCatalog(c)));
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    ExpectEqual(c, *decoded);
  }
}

}  // namespace
}  // namespace torch_ckpt
