#include <gtest/gtest.h>

#include <string>

#include "format/torch/pickle.h"
#include "format/torch/pickle_object.h"
#include "format/torch/state.h"
#include "format/torch/tensor.h"

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

TEST(PickleTest, ReadsNumbersAndTextsOfEverySize) {
  const std::string text = Pickled(
      "(\x8a\x06\xff\xff\xff\xff\xff\x7f"
      "\x8a\x06\0\0\0\0\0\x80"
      "\x8a\x07\0\0\0\0\0\x80\0"
      "\x8a\x08\0\0\0\0\0\0\0\x80"
      "\x8b\x08\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"
      "\x8a\0\x8a\x09\0\0\0\0\0\0\0\0\x01"
      "\x8b\x09\0\0\0\0\0\0\0\0\0\0\0\x02"
      "\x8c\x02uaX\x02\0\0\0ub\x8d\x02\0\0\0\0\0\0\0uc"
      "U\x02saT\x02\0\0\0sbC\x02"
      "baB\x02\0\0\0bb\x8e\x02\0\0\0\0\0\0\0bc"
      "\x96\x02\0\0\0\0\0\0\0bdt"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const auto items = pickle->root().items();
  ASSERT_EQ(items.size(), 17u);
  const int64_t numbers[] = {(int64_t{1} << 47) - 1,
                             -(int64_t{1} << 47),
                             int64_t{1} << 47,
                             INT64_MIN,
                             INT64_MAX,
                             0};
  for (size_t i = 0; i < std::size(numbers); ++i) {
    EXPECT_TRUE(items[i].Is(PickleKind::kInt)) << i;
    EXPECT_EQ(items[i].integer(), numbers[i]) << i;
  }
  EXPECT_TRUE(items[6].Is(PickleKind::kBigInt));
  EXPECT_EQ(items[6].text(), "\0\0\0\0\0\0\0\0\x01"s);
  EXPECT_EQ(items[7].text(), "\0\0\0\0\0\0\0\0\x02"s);
  const char* const texts[] = {"ua", "ub", "uc", "sa", "sb", "ba", "bb", "bc"};
  for (size_t i = 0; i < std::size(texts); ++i) {
    EXPECT_EQ(items[8 + i].text(), texts[i]);
  }
  EXPECT_TRUE(items[16].Is(PickleKind::kMade, PickleName::kBytearray));
  EXPECT_EQ(items[16].items()[0].text(), "bd");
}

// [0, 1, ..., 999], each remembered; then some of them recalled.
TEST(PickleTest, RecallsWhateverWasRemembered) {
  std::string program = "(";
  for (int i = 0; i < 1000; ++i) {
    program += "M"s + static_cast<char>(i) + static_cast<char>(i >> 8) + "\x94";
  }
  program += "h\xffj\0\x01\0\0j\xe7\x03\0\0j\x07\0\0\0"s;
  // A pickler that counts itself may remember anew.
  program += "\x88r\x07\x01\0\0j\x07\x01\0\0\x8c\x01jt"s;
  const std::string text = Pickled(program);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRefuse);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  const auto items = pickle->root().items();
  ASSERT_EQ(items.size(), 1007u);
  EXPECT_EQ(items[999].integer(), 999);
  EXPECT_EQ(items[1000].integer(), 255);
  EXPECT_EQ(items[1001].integer(), 256);
  EXPECT_EQ(items[1002].integer(), 999);
  EXPECT_EQ(items[1003].integer(), 7);
  EXPECT_TRUE(items[1005].Is(PickleKind::kBool));
  EXPECT_EQ(items[1006].text(), "j");
  for (const char* beyond : {"j\xe8\x03\0\0t", "j\xff\xff\xff\xfft"}) {
    const std::string again =
        "(" + program.substr(1, 4000) + std::string(beyond, 6);
    EXPECT_EQ(ErrorOf(again).kind(), ErrorKind::kCorrupt);
  }
}

TEST(PickleTest, AllThatIsRememberedFits) {
  EXPECT_EQ(ErrorOf("N" + std::string(20'000'000, '\x94')).ToString(), "ok");
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
  Budget budget("the pickle", text.size());
  // As data: who reads it knows that this is no enum.
  const auto object = ObjectOfPickle(*FindKey(items, "a"), {}, &budget);
  ASSERT_TRUE(object.ok()) << object.status().ToString();
  EXPECT_EQ(*object, R"({"$":"enum","c":"os:system","v":"x"})");
  for (const char* key : {"b", "c", "d"}) {
    const auto refused = ObjectOfPickle(*FindKey(items, key), {}, &budget);
    EXPECT_EQ(refused.status().kind(), ErrorKind::kUnsupported);
    EXPECT_NE(refused.status().message().find("evil."), std::string::npos);
  }
}

TEST(PickleTest, SaysUnknownNamesThatAreData) {
  struct Row {
    std::string program;
    const char* says;  // null: refused
  };
  for (const Row& row : std::vector<Row>{
           {"ca.b\nC\nK\x05\x85R", R"({"$":"enum","c":"a.b:C","v":5})"},
           {"ca.b\nC\n\x8c\x01y\x85R", R"({"$":"enum","c":"a.b:C","v":"y"})"},
           {"ca.b\nC\n)\x81}\x8c\x01kK\x01sb",
            R"({"$":"record","c":"a.b:C","v":[["k",1]]})"},
           {"csignal\nSIGUSR1\n",
            R"({"$":"enum","c":"signal:Signals","n":"SIGUSR1"})"},
           {"c_io\nBytesIO\n)\x81(C\x02"
            "abK\x01Ntb",
            R"({"$":"bytesio","p":1,"b":"YWI="})"},
           {"ca.b\nC\n)R", nullptr},                  // no argument
           {"ca.b\nC\nK\x01K\x02\x86R", nullptr},     // two
           {"ca.b\nC\n]\x85R", nullptr},              // no scalar
           {"ca.b\nC\nK\x05\x85R}b", nullptr},        // and a state
           {"ca.b\nC\n)\x81}K\x01K\x01sb", nullptr},  // of no names
           {"ca.b\nC\n)\x81K\x01"
            "b",
            nullptr},  // of none
           {"csignal\nSIG_IGN\n", nullptr},
           {"csignal\nraise_signal\n", nullptr},
           {"c_io\nBytesIO\n)\x81", nullptr},
           {"c_io\nBytesIO\n)\x81(C\x01"
            "aJ\xff\xff\xff\xffNtb",
            nullptr},
       }) {
    const std::string text = Pickled(row.program);
    const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRecord);
    ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
    Budget budget("the pickle", text.size());
    const auto object = ObjectOfPickle(pickle->root(), {}, &budget);
    EXPECT_EQ(object.ok(), row.says != nullptr) << text;
    if (object.ok() && row.says) {
      EXPECT_EQ(*object, row.says);
    }
  }
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
  Budget budget("the pickle", text.size());
  const auto state = FlattenState(pickle->root().items().back(), &budget);
  EXPECT_EQ(state.status().kind(), ErrorKind::kExhausted);
}

TEST(TorchStateTest, RefusesADictThatHoldsItself) {
  const std::string text = Pickled("}\x94\x8c\x01xh\0s"s);
  const auto pickle = Pickle::Parse(AsBytes(text), UnknownNames::kRecord);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  Budget budget("the pickle", text.size());
  const auto state = FlattenState(pickle->root(), &budget);
  EXPECT_FALSE(state.ok());
}

}  // namespace
}  // namespace torch_ckpt
