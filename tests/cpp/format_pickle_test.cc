#include <gtest/gtest.h>

#include <string>

#include "format/pickle.h"
#include "format/pickle_object.h"
#include "format/torch_state.h"
#include "format/torch_tensor.h"

namespace torch_ckpt {
namespace {

using namespace std::string_literals;

// What Python's pickle makes at protocol 4 without frames.
std::string Pickled(const std::string& program) {
  return "\x80\x04"s + program + ".";
}

Status ErrorOf(const std::string& program) {
  const std::string text = Pickled(program);
  return Pickle::Parse(AsBytes(text), UnknownNames::kRefuse).status();
}

TEST(PickleTest, ReadsPlainValues) {
  const std::string text = Pickled(
      "(N\x88\x89K\x07M\x01\x02J\xff\xff\xff\xff\x8a\x01\xfeG\x3f\xf8\0\0\0\0\0"
      "\0"
      "\x8c\x02hiC\x01\xff"
      "t"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  EXPECT_EQ(pickle->bytes(), text.size());
  const auto items = pickle->root().items();
  ASSERT_EQ(items.size(), 10u);
  EXPECT_TRUE(items[0].Is(PickleKind::kNone));
  EXPECT_TRUE(items[1].boolean());
  EXPECT_FALSE(items[2].boolean());
  EXPECT_EQ(items[3].integer(), 7);
  EXPECT_EQ(items[4].integer(), 513);
  EXPECT_EQ(items[5].integer(), -1);
  EXPECT_EQ(items[6].integer(), -2);
  EXPECT_EQ(items[7].real(), 1.5);
  EXPECT_EQ(items[8].text(), "hi");
  EXPECT_EQ(items[9].text(), "\xff");
}

// {"a": [1, 2], "a2": same list}
TEST(PickleTest, RemembersAndFillsContainers) {
  const std::string text = Pickled(
      "}(\x8c\x01"
      "a](K\x01K\x02"
      "e\x94\x8c\x02"
      "a2h\0u"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const PickleValue* list = FindKey(pickle->root().items(), "a2");
  ASSERT_TRUE(list && list->Is(PickleKind::kList));
  EXPECT_EQ(list->items()[1].integer(), 2);
  EXPECT_EQ(FindKey(pickle->root().items(), "b"), nullptr);
}

// torch.Size((2, 3)), by REDUCE.
TEST(PickleTest, MakesNothingOfNames) {
  const std::string text = Pickled("ctorch\nSize\nK\x02K\x03\x86\x85R");
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  EXPECT_TRUE(pickle->root().Is(PickleKind::kMade, PickleName::kSize));
  EXPECT_EQ(*ReadSize(pickle->root()), (Dims{2, 3}));
}

TEST(PickleTest, AnObjectHasItsStateWhereverItIsRemembered) {
  // An object is remembered, then BUILD gives it {"fqn": "w"}.
  const std::string text = Pickled(
      "ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81\x94"
      "}\x8c\x03"
      "fqn\x8c\x01wsb0h\0"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  ASSERT_TRUE(
      pickle->root().Is(PickleKind::kObject, PickleName::kMetadataIndex));
  EXPECT_EQ(FindAttribute(pickle->root().object(), "fqn")->text(), "w");
}

TEST(PickleTest, NamesThatAreNotOnTheListAreErrorsThatNameThem) {
  for (const char* program : {"cos\nsystem\n\x8c\x02id\x85R",
                              "\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R",
                              "cbuiltins\neval\n\x8c\x01"
                              "1\x85R",
                              "c__builtin__\nexec\n)R"}) {
    const Status status = ErrorOf(program);
    EXPECT_EQ(status.kind(), ErrorKind::kUnsupported) << program;
    EXPECT_NE(status.ToString().find("names"), std::string::npos);
  }
  EXPECT_NE(ErrorOf("cposix\nsystem\n)R").ToString().find("posix.system"),
            std::string::npos);
}

TEST(PickleTest, OperationsThatLookUpOrCallAreRefused) {
  for (const char* program :
       {"(S'id'\nios\nsystem\n", "(cos\nsystem\no", "\x82\x01", "\x83\x01\x01",
        "\x84\x01\x01\x01\x01", "Pid\n", "I1\n", "\x97", "\x98"}) {
    EXPECT_EQ(ErrorOf(program).kind(), ErrorKind::kUnsupported) << program;
  }
}

TEST(PickleTest, BuildChangesObjectsOnly) {
  EXPECT_EQ(ErrorOf("ctorch\nSize\n)R}b").kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(ErrorOf("ctorch\nSize\n}b").kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(ErrorOf("]}b").kind(), ErrorKind::kUnsupported);
  const std::string twice =
      "ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81}b}b";
  EXPECT_EQ(ErrorOf(twice).kind(), ErrorKind::kCorrupt);
}

TEST(PickleTest, WhatIsNoPickleIsAnError) {
  EXPECT_EQ(Pickle::Parse({}, UnknownNames::kRefuse).status().kind(),
            ErrorKind::kCorrupt);
  EXPECT_EQ(Pickle::Parse(AsBytes("PK\x03\x04"), UnknownNames::kRefuse)
                .status()
                .kind(),
            ErrorKind::kCorrupt);
  EXPECT_EQ(Pickle::Parse(AsBytes("\x80\x01N."), UnknownNames::kRefuse)
                .status()
                .kind(),
            ErrorKind::kUnsupported);
  for (const char* program : {"",
                              "NN",
                              "(N",
                              "t",
                              "u",
                              "R",
                              "b",
                              "\x85",
                              "a",
                              "h\x01",
                              "\x94",
                              "1",
                              "0",
                              "2",
                              "\x8c\x05"
                              "ab",
                              "X\xff\xff\xff\xff",
                              "J\x01",
                              "\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
                              "}(Nu",
                              "](N",
                              "}K\x01"
                              "a",
                              "]K\x01K\x02s",
                              "K\x01K\x02"
                              "a",
                              "\x93",
                              "NN\x93",
                              "N)R",
                              "ctorch\nSize\nNR",
                              "ctorch\nSi",
                              "Nr\xff\xff\xff\x7f",
                              "\xff"}) {
    const Status status = ErrorOf(program);
    EXPECT_EQ(status.kind(), ErrorKind::kCorrupt) << program;
  }
}

TEST(PickleTest, MemoryIsBoundedByTheBytes) {
  std::string dicts;
  for (int i = 0; i < 4'000'000; ++i) dicts += "}0";
  EXPECT_TRUE(ErrorOf(dicts + "N").ok());
  // Objects of 48 bytes for 4 bytes each.
  std::string objects =
      "ctorch.distributed.checkpoint.metadata\nStorageMeta\n\x94"
      "0(";
  for (int i = 0; i < 1'000'000; ++i) objects += "h\0)\x81"s;
  EXPECT_EQ(ErrorOf(objects + "t").ToString(), "ok");
}

TEST(PickleTest, ListsOfAnyPlainValuesFit) {
  // As Python writes them: a thousand at a time, each remembered.
  std::string program = "]\x94";
  for (int batch = 0; batch < 600; ++batch) {
    program += "(";
    for (int i = 0; i < 1000; ++i) program += "}\x94";
    program += "e";
  }
  EXPECT_EQ(ErrorOf(program).ToString(), "ok");
  std::string truths = "]";
  for (int batch = 0; batch < 1200; ++batch) {
    truths += "(" + std::string(1000, '\x88') + "e";
  }
  EXPECT_EQ(ErrorOf(truths).ToString(), "ok");
}

TEST(PickleTest, EveryPrefixIsAnError) {
  const std::string text = Pickled(
      "}(\x8c\x01"
      "a](K\x01K\x02"
      "e\x94\x8c\x02"
      "a2h\0\x8c\x01"
      "bctorch\nSize\n"
      "K\x02K\x03\x86\x85Ru"s);
  ASSERT_TRUE(Pickle::Parse(AsBytes(text), UnknownNames::kRefuse).ok());
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(
        Pickle::Parse(AsBytes(text).first(size), UnknownNames::kRefuse).ok())
        << size;
  }
}

// What names that are not on the list make is a record of them, whatever the
// pickle does with it.
TEST(PickleTest, RecordsUnknownNames) {
  // {"a": os.system("x"), "b": evil.Class.__new__() with state and items,
  //  "c": evil.f()(), "d": evil.g}
  const std::string text = Pickled(
      "}(\x8c\x01"
      "acos\nsystem\n\x8c\x01x\x85R"
      "\x8c\x01"
      "bcevil\nClass\n)\x81(K\x01K\x02"
      "e(K\x03K\x04u}bNb"
      "\x8c\x01"
      "ccevil\nf\n)R)R"
      "\x8c\x01"
      "dcevil\ng\nu"s);
  EXPECT_EQ(Pickle::Parse(AsBytes(text), UnknownNames::kRefuse).status().kind(),
            ErrorKind::kUnsupported);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRecord);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const auto items = pickle->root().items();
  EXPECT_EQ(UnknownName(*FindKey(items, "a")), "os.system");
  EXPECT_EQ(UnknownName(*FindKey(items, "b")), "evil.Class");
  EXPECT_EQ(UnknownName(*FindKey(items, "c")), "evil.f");
  EXPECT_EQ(UnknownName(*FindKey(items, "d")), "evil.g");
  EXPECT_EQ(UnknownName(pickle->root()), "");
  const auto object = ObjectOfPickle(*FindKey(items, "a"), {});
  EXPECT_EQ(object.status().kind(), ErrorKind::kUnsupported);
  EXPECT_NE(object.status().message().find("os.system"), std::string::npos);
}

TEST(TorchStateTest, BoundsWhatSharedContainersSay) {
  // Each dict holds the one before it twice: 2^60 leaves.
  std::string program = "}\x94\x8c\x01xK\x01s";
  for (char i = 0; i < 60; ++i) {
    program += "}\x94(\x8c\x01"s + "ah" + i + "\x8c\x01" + "bh" + i + "u";
  }
  // The stack holds them all; only the last stays.
  const std::string text = Pickled("(" + program + "t");
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRecord);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const auto state =
      FlattenState(pickle->root().items().back(), pickle->bytes());
  EXPECT_EQ(state.status().kind(), ErrorKind::kExhausted);
}

TEST(TorchStateTest, RefusesADictThatHoldsItself) {
  const std::string text = Pickled("}\x94\x8c\x01xh\0s"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRecord);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const auto state = FlattenState(pickle->root(), pickle->bytes());
  EXPECT_FALSE(state.ok());
}

}  // namespace
}  // namespace torch_ckpt
