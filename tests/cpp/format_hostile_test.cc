// Small files that say the same in very many places: what reading them costs.
#include <gtest/gtest.h>

#include <string>

#include "budget_test_util.h"
#include "format/ours/catalog.h"
#include "format/ours/catalog_builder.h"
#include "format/torch/dcp_metadata.h"
#include "format/torch/pickle.h"
#include "format/torch/pickle_object.h"
#include "format/torch/state.h"

namespace torch_ckpt {
namespace {

using namespace std::string_literals;

std::string Text(const std::string& text) {
  std::string size(4, '\0');
  for (int i = 0; i < 4; ++i) {
    size[static_cast<size_t>(i)] = static_cast<char>(text.size() >> (8 * i));
  }
  return "X" + size + text;
}
std::string Number(size_t number) {
  const std::string digits = std::to_string(number);
  return Text(std::string(8 - digits.size(), '0') + digits);
}
// A pickle whose memo begins with `said`, each at its position, which Said(i)
// recalls.
std::string Pickled(const std::vector<std::string>& said,
                    const std::string& program) {
  std::string out = "\x80\x04";
  for (const std::string& each : said) out += each + "\x94" + "0";
  return out + program + ".";
}
std::string Said(int at) { return "h"s + static_cast<char>(at); }
std::string Times(size_t count, const std::string& program) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += program;
  return out;
}

Cost Flatten(const std::string& pickle) {
  const auto parsed = Pickle::Parse(AsBytes(pickle), UnknownNames::kRecord);
  Budget budget("the pickle", pickle.size());
  const Status status = parsed.ok()
                            ? FlattenState(parsed->root(), &budget).status()
                            : parsed.status();
  return {status, budget.steps(), pickle.size()};
}

TEST(HostileTest, AKeyInManyMappings) {
  // Of names that are possible, and of one that nobody looks at.
  for (const size_t key_bytes : {10, 100}) {
    ExpectLinear(
        [&](size_t n) {
          std::string items;
          for (size_t i = 0; i < n; ++i) {
            items += Number(i) + "}" + Said(0) + "K\x01s";
          }
          return Flatten(Pickled({Text(std::string(key_bytes * n, 'k'))},
                                 "}(" + items + "u"));
        },
        3000);
  }
}

TEST(HostileTest, AKeyAmongNumbers) {
  // {"k...": 1, 1: 1}, many times.
  ExpectLinear(
      [](size_t n) {
        std::string items;
        for (size_t i = 0; i < n; ++i) items += Number(i) + Said(1);
        return Flatten(Pickled({Text(std::string(20 * n, 'k')),
                                "}" + Said(0) + "K\x01sK\x01K\x01s"},
                               "}(" + items + "u"));
      },
      1500);
}

TEST(HostileTest, ALongKeyOfTheStateDictIsAnErrorAndOneBelowALeaf) {
  const std::string key = Text(std::string(70'000, 'k'));
  const Cost root = Flatten(Pickled({}, "}" + key + "K\x01s"));
  EXPECT_EQ(root.status.kind(), ErrorKind::kUnsupported);
  const Cost below =
      Flatten(Pickled({}, "}" + Number(1) + "}" + key + "K\x01ss"));
  EXPECT_TRUE(below.status.ok()) << below.status.ToString();
}

TEST(HostileTest, ListsThatAreLookedThrough) {
  // For tensors and mappings, of which there is none.
  ExpectLinear(
      [](size_t n) {
        const std::string numbers = "](" + Times(n, "K\x01") + "e";
        std::string items;
        for (size_t i = 0; i < n; ++i) items += Number(i) + Said(0);
        return Flatten(Pickled({numbers}, "}(" + items + "u"));
      },
      3000);
}

// One key of 60 KB that each leaf below it has in its name.
TEST(HostileTest, ALongKeyOfManyLeaves) {
  const auto read = [](size_t leaves) {
    std::string items;
    for (size_t i = 0; i < leaves; ++i) items += Number(i) + "K\x01";
    return Flatten(Pickled(
        {}, "}" + Text(std::string(60'000, 'k')) + "}(" + items + "us"));
  };
  EXPECT_TRUE(read(100).status.ok());
  // Of which each is named in 60 KB, and found in as many.
  EXPECT_EQ(read(400).status.kind(), ErrorKind::kExhausted);
}

// A mapping of a thousand leaves that many others are.
TEST(HostileTest, AMappingInManyPlaces) {
  const auto read = [](size_t count) {
    std::string inner, items;
    for (size_t i = 0; i < 1000; ++i) inner += Number(i) + "K\x01";
    for (size_t i = 0; i < count; ++i) items += Number(i) + Said(0);
    return Flatten(Pickled({"}(" + inner + "u"}, "}(" + items + "u"));
  };
  EXPECT_TRUE(read(20).status.ok());
  EXPECT_EQ(read(50).status.kind(), ErrorKind::kExhausted);
}

// Of numbers by numbers, than which nothing takes fewer bytes.
TEST(HostileTest, HonestMappingsOfManyLeavesAreNone) {
  std::string items;
  for (size_t i = 0; i < 300'000; ++i) {
    items += "J" + std::string(reinterpret_cast<const char*>(&i), 4) + "K\x01";
  }
  const Cost cost =
      Flatten(Pickled({}, "}" + Text("counts") + "}(" + items + "us"));
  EXPECT_TRUE(cost.status.ok()) << cost.status.ToString();
}

Cost WriteObject(const std::string& pickle) {
  const auto parsed = Pickle::Parse(AsBytes(pickle), UnknownNames::kRecord);
  Budget budget("the pickle", pickle.size());
  const Status status =
      parsed.ok() ? ObjectOfPickle(parsed->root(), {}, &budget).status()
                  : parsed.status();
  return {status, budget.steps(), pickle.size()};
}

TEST(HostileTest, APathOfManyParts) {
  const auto path = [](size_t n) {
    return WriteObject(
        Pickled({Text(std::string(10 * n, 'p'))},
                "cpathlib\nPosixPath\n(" + Times(n, Said(0)) + "tR"));
  };
  ExpectLinear(path, 1500);
  // 4 GiB of path: no more is made than a text may have.
  const Cost large = path(20'000);
  EXPECT_EQ(large.status.kind(), ErrorKind::kExhausted);
}

TEST(HostileTest, TextsOfObjectsInManyPlaces) {
  for (const std::string& value :
       {Said(0), "c_codecs\nencode\n" + Said(0) + Text("latin1") + "\x86R",
        "}" + Said(0) + "K\x01s"}) {
    ExpectLinear(
        [&](size_t n) {
          return WriteObject(Pickled({Text(std::string(20 * n, 't'))},
                                     "(" + Times(n, value) + "t"));
        },
        1000);
  }
}

// Each leaf is an object that fails at its end: all of that work counts.
TEST(HostileTest, ObjectsThatFailLate) {
  const std::string pickle = Pickled({Text(std::string(1'000'000, 't'))},
                                     "(" + Said(0) + "cos\nsystem\n" + "t");
  const auto parsed = Pickle::Parse(AsBytes(pickle), UnknownNames::kRecord);
  ASSERT_TRUE(parsed.ok());
  Budget budget("the pickle", pickle.size());
  ASSERT_TRUE(budget.Step(Budget::kStepsAnyway));  // so that it is soon over
  int tried = 0;
  Status status;
  do {
    status = ObjectOfPickle(parsed->root(), {}, &budget).status();
    ++tried;
  } while (status.kind() == ErrorKind::kUnsupported && tried < 10'000);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_LT(tried, 600);
}

// --- .metadata ---

std::string Made(const std::string& name, const std::string& items) {
  return "ctorch.distributed.checkpoint.metadata\n" + name + "\n)\x81}(" +
         items + "ub";
}
std::string Metadata(const std::string& state, const std::string& places,
                     const std::string& paths) {
  return Made("Metadata", Text("state_dict_metadata") + "}(" + state + "u" +
                              Text("storage_data") + "}(" + places + "u" +
                              Text("planner_data") + "}(" + paths + "u");
}

// With two million steps anyway, so that the tests are quick.
Cost ReadMetadata(const std::string& pickle) {
  Budget budget("the pickle", pickle.size());
  const uint64_t spent = Budget::kStepsAnyway - 2'000'000;
  EXPECT_TRUE(budget.Step(spent));
  const auto metadata = ParseDcpMetadata(AsBytes(pickle), &budget);
  return {metadata.status(), budget.steps() - spent, pickle.size()};
}

TEST(HostileTest, PathsThatTurnOutToBeNone) {
  ExpectLinear(
      [](size_t n) {
        std::string paths;
        for (size_t i = 0; i < n; ++i) paths += Number(i) + Said(1);
        return ReadMetadata(
            Pickled({Text(std::string(5 * n / 2, 'p')), "(" + Said(0) + "Nt"},
                    Metadata("", "", paths)));
      },
      6000);
}

// A part of 60 KB that many paths share.
TEST(HostileTest, ALongPartOfManyPaths) {
  const auto read = [](size_t count) {
    std::string paths;
    for (size_t i = 0; i < count; ++i) {
      paths += Number(i) + Said(0) + Number(i) + "\x86";
    }
    return ReadMetadata(
        Pickled({Text(std::string(60'000, 'p'))}, Metadata("", "", paths)));
  };
  EXPECT_TRUE(read(200).status.ok());
  EXPECT_EQ(read(400).status.kind(), ErrorKind::kExhausted);
}

TEST(HostileTest, PlacesOfATensorOfAnotherDtype) {
  ExpectLinear(
      [](size_t n) {
        const std::string properties =
            "ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81("
            "ctorch\ncomplex128\ntb";
        const std::string tensor =
            Made("TensorStorageMetadata", Text("properties") + properties);
        const std::string index = Made("MetadataIndex", Text("fqn") + Said(0));
        const std::string info =
            "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(" +
            Text("relative_path") + Text("a.distcp") + Text("offset") + "K\0"s +
            Text("length") + "K\x09ub";
        return ReadMetadata(Pickled(
            {Text(std::string(27 * n / 10, 'n')), index, info},
            Metadata(Said(0) + tensor, Times(n, Said(1) + Said(2)), "")));
      },
      6000);
}

TEST(HostileTest, ChunksOfManyTensors) {
  ExpectLinear(
      [](size_t n) {
        const std::string chunk =
            Made("ChunkStorageMetadata",
                 Text("offsets") + "(K\0t"s + Text("sizes") + "(K\x01t");
        const std::string properties =
            "ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81("
            "ctorch\nfloat32\ntb";
        std::string state;
        for (size_t i = 0; i < n; ++i) {
          state +=
              Number(i) + Made("TensorStorageMetadata",
                               Text("properties") + properties + Text("size") +
                                   "(K\x01t" + Text("chunks") + Said(1));
        }
        Cost cost = ReadMetadata(Pickled(
            {chunk, "](" + Times(n, Said(0)) + "e"}, Metadata(state, "", "")));
        // No chunk has a place, which is found out at the end.
        if (cost.status.kind() == ErrorKind::kIncomplete) cost.status = {};
        return cost;
      },
      1500);
}

// --- what parsing keeps ---

// A name of 400 bytes for each five.
TEST(HostileTest, ParsingKeepsSixteenTimesTheBytes) {
  const std::string name(200, 'n');
  const std::string pickle = Pickled(
      {Text(name)}, "(" + Times(1'200'000, Said(0) + Said(0) + "\x93") + "t");
  const auto parsed = Pickle::Parse(AsBytes(pickle), UnknownNames::kRecord);
  EXPECT_EQ(parsed.status().kind(), ErrorKind::kExhausted);
}

// --- catalogs ---

TEST(HostileTest, MoreReplicasThanRanks) {
  const std::vector<ManifestFile> files = {{"a", "", FileRole::kData, 100, {}},
                                           {"b", "", FileRole::kData, 100, {}}};
  for (const size_t replicas : {1, 3, 40'000}) {
    CatalogBuilder builder;
    const auto entry = builder.AddTensor("w", Dtype::kF32, {2});
    ASSERT_TRUE(entry.ok());
    Placement placement;
    placement.box = Box::Whole({2});
    ASSERT_TRUE(builder.AddPlacement(*entry, placement).ok());
    placement.role = PlacementRole::kReplica;
    placement.file = 1;
    for (size_t i = 0; i < replicas; ++i) {
      ASSERT_TRUE(builder.AddPlacement(*entry, placement).ok());
    }
    const auto catalog = Catalog::From(std::move(builder), files);
    ASSERT_TRUE(catalog.ok());
    const Status status = catalog->Placements(0, files).status();
    EXPECT_EQ(status.ok(), replicas == 1) << status.ToString();
    if (!status.ok()) {
      EXPECT_EQ(status.kind(), ErrorKind::kCorrupt);
      EXPECT_EQ(status.tensor(), "w");
    }
  }
}

// Who reads all of a catalog decodes the placements of each alias.
TEST(HostileTest, AliasesOfATensorOfManyPlacements) {
  const std::vector<ManifestFile> files = {
      {"a", "", FileRole::kData, uint64_t{1} << 20, {}}};
  ExpectLinear(
      [&](size_t n) {
        CatalogBuilder builder;
        const auto entry =
            builder.AddTensor("w", Dtype::kU8, {static_cast<int64_t>(n)});
        EXPECT_TRUE(entry.ok());
        for (size_t i = 0; i < n; ++i) {
          Placement placement;
          placement.box = {{static_cast<int64_t>(i)}, {1}};
          EXPECT_TRUE(builder.AddPlacement(*entry, placement).ok());
          EXPECT_TRUE(builder.AddAlias("a" + std::to_string(i), "w").ok());
        }
        Cost cost;
        const auto text = builder.Encode();
        EXPECT_TRUE(text.ok());
        cost.bytes = text->size();
        const auto catalog = Catalog::Parse(*text, files);
        cost.status = catalog.status();
        for (uint32_t e = 0; catalog.ok() && e <= n; ++e) {
          const auto placements = catalog->Placements(e, files);
          EXPECT_TRUE(placements.ok());
          cost.steps += 8 * placements->size();
        }
        return cost;
      },
      800);
}

TEST(HostileTest, PlacementsAreDecodedInBoundedMemory) {
  const std::vector<ManifestFile> files = {
      {"a", "", FileRole::kData, uint64_t{1} << 40, {}}};
  CatalogBuilder builder;
  const auto entry = builder.AddTensor("w", Dtype::kU8, {int64_t{1} << 22});
  ASSERT_TRUE(entry.ok());
  std::vector<Placement> placements(2'000'000);
  for (size_t i = 0; i < placements.size(); ++i) {
    placements[i].box = {{static_cast<int64_t>(i)}, {1}};
  }
  builder.SetPlacements(*entry, placements);
  placements = {};
  const auto catalog = Catalog::From(std::move(builder), files);
  ASSERT_TRUE(catalog.ok());
  EXPECT_EQ(catalog->Placements(0, files).status().kind(),
            ErrorKind::kExhausted);
}

TEST(HostileTest, AnAliasHasThePlacementsOfItsTensor) {
  const std::vector<ManifestFile> files = {{"a", "", FileRole::kData, 100, {}}};
  CatalogBuilder builder;
  ASSERT_TRUE(builder.AddTensor("w", Dtype::kU8, {1}).ok());
  ASSERT_TRUE(builder.AddAlias("a", "w").ok());
  const auto catalog = Catalog::From(std::move(builder), files);
  ASSERT_TRUE(catalog.ok());
  EXPECT_EQ(catalog->TensorOf(0), 1u);
  EXPECT_EQ(catalog->TensorOf(1), 1u);
}

}  // namespace
}  // namespace torch_ckpt
