#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/bytes.h"
#include "budget_test_util.h"
#include "engine/open/torch_archive.h"
#include "engine/open/torch_leaves.h"
#include "format/torch/dtensor.h"
#include "format/torch/pickle.h"
#include "format/torch/pickle_object.h"
#include "format/torch/unread.h"
#include "os_test_util.h"

namespace torch_ckpt {
namespace {

using namespace std::string_literals;

template <class T>
std::string Raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string Text(const std::string& text) {
  return "X" + Raw(static_cast<uint32_t>(text.size())) + text;
}
std::string Int(uint32_t number) { return "J" + Raw(number); }
std::string Attributes(const std::string& items) { return "}(" + items + "u"; }
// An object of `name`, "module\nclass", with these attributes.
std::string Object(const std::string& name, const std::string& items) {
  return "c" + name + "\n)\x81" + Attributes(items) + "b";
}
// Of bytes of the storage "0", which has one: the same one everywhere.
std::string Expanded(uint32_t size) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + Text("storage") +
         "ctorch\nByteStorage\n" + Text("0") + Text("cpu") + "K\x01tQK\0("s +
         Int(size) + "t(K\0t\x89}tR"s;
}

class TorchArchiveTest : public TemporaryDirectory {
 protected:
  // As torch.save lays one out, with this pickle and the storage "0".
  Result<TorchArchive> Open(const std::string& pickle) {
    std::string out, directory;
    for (const auto& [name, content] :
         {std::pair("a/data.pkl"s, pickle), std::pair("a/data/0"s, "x"s)}) {
      const auto at = static_cast<uint32_t>(out.size());
      const auto size = static_cast<uint32_t>(content.size());
      const std::string sizes = Raw<uint32_t>(0) + Raw(size) + Raw(size) +
                                Raw(static_cast<uint16_t>(name.size())) +
                                Raw<uint16_t>(0);
      const std::string head = Raw<uint64_t>(0) + sizes;
      out += "PK\x03\x04" + Raw<uint16_t>(20) + head + name + content;
      directory += "PK\x01\x02" + Raw<uint16_t>(20) + Raw<uint16_t>(20) + head +
                   std::string(10, '\0') + Raw(at) + name;
    }
    const auto begin = static_cast<uint32_t>(out.size());
    out += directory + "PK\x05\x06" + Raw<uint32_t>(0) + Raw<uint16_t>(2) +
           Raw<uint16_t>(2) + Raw(static_cast<uint32_t>(directory.size())) +
           Raw(begin) + Raw<uint16_t>(0);
    TC_RETURN_IF_ERROR(dir().Unlink("a.pt", /*missing_ok=*/true));
    TC_RETURN_IF_ERROR(dir().WriteFile("a.pt", out));
    TC_ASSIGN_OR_RETURN(file_, dir().OpenFile("a.pt", {}));
    return TorchArchive::Open(file_, {0, out.size()}, kMaxObjectPickle);
  }

 private:
  File file_;
};

// Objects of one tensor of 256 KiB each, all of which are one byte of the file.
TEST_F(TorchArchiveTest, ExpandedTensorsOfManyObjects) {
  const auto read = [&](size_t n) {
    const std::string said = "\x80\x04" + Expanded(1 << 18) + "\x94" + "0";
    std::string items;
    for (size_t i = 0; i < n; ++i) {
      items += Int(static_cast<uint32_t>(i)) + "h\0\x85"s;
    }
    const std::string pickle = said + Attributes(items) + ".";
    Cost cost;
    const auto archive = Open(pickle);
    EXPECT_TRUE(archive.ok()) << archive.status().ToString();
    if (!archive.ok()) return cost;
    cost.bytes = pickle.size() - said.size();
    Budget budget = archive->MakeBudget();
    const auto values = archive->root().items();
    for (size_t i = 1; i < values.size() && cost.status.ok(); i += 2) {
      cost.status = ObjectOfPickle(
                        values[i],
                        [&](const TorchTensor& tensor) {
                          return archive->Elements(tensor, &budget);
                        },
                        &budget)
                        .status();
    }
    cost.steps = budget.steps();
    return cost;
  };
  ExpectLinear(read, 20);
  EXPECT_EQ(read(1000).status.kind(), ErrorKind::kExhausted);
}

// Elements are charged as they are made, and not as they are stored.
TEST_F(TorchArchiveTest, ElementsOfExpandedTensorsCount) {
  const auto archive = Open("\x80\x04" + Expanded(1 << 20) + ".");
  ASSERT_TRUE(archive.ok()) << archive.status().ToString();
  const auto tensor = ReadTorchTensor(archive->root());
  ASSERT_TRUE(tensor.ok()) << tensor.status().ToString();
  Budget budget = archive->MakeBudget();
  ASSERT_TRUE(budget.Step(Budget::kStepsAnyway - 100'000));
  int read = 0;
  Status status;
  for (; status.ok() && read < 1000; ++read) {
    const auto elements = archive->Elements(*tensor, &budget);
    status = elements.status();
    if (status.ok()) {
      EXPECT_EQ(*elements, std::string(1 << 20, 'x'));
    }
  }
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_LT(read, 10);
}

// DTensors of one spec, whose order says many mesh dimensions: none of them is
// looked at for each tensor.
TEST(TorchLeavesTest, OrdersOfMeshDimensions) {
  const std::string spec = "torch.distributed.tensor._dtensor_spec\n";
  const auto read = [&](size_t n, size_t count) {
    std::string dims;
    for (size_t i = 0; i < count; ++i) dims += "K\0"s;
    const std::string order =
        "c" + spec + "ShardOrderEntry\n(K\0("s + dims + "tt\x81";
    const std::string mesh = Object(
        "torch.distributed.device_mesh\nDeviceMesh",
        Text("mesh") + Expanded(1) + Text("_coordinate_on_dim") + "(K\0t"s);
    const std::string shard =
        Object("torch.distributed.tensor.placement_types\nShard",
               Text("dim") + "K\0"s);
    const std::string state =
        Attributes(Text("_local_tensor") + Expanded(1) + Text("_spec") +
                   Object(spec + "DTensorSpec",
                          Text("mesh") + mesh + Text("placements") + "(" +
                              shard + "t" + Text("shard_order") + "(" + order +
                              "t")) +
        "}\x86";
    const std::string tensor =
        "ctorch._tensor\n_rebuild_from_type_v2\n("
        "ctorch._utils\n_rebuild_wrapper_subclass\n"
        "ctorch.distributed.tensor\nDTensor\n"
        "(ctorch.distributed.tensor\nDTensor\nctorch\nuint8\n(K\x01tt" +
        state + "tR";
    std::string items;
    for (size_t i = 0; i < n; ++i) {
      items += Int(static_cast<uint32_t>(i)) + "h\0"s;
    }
    const std::string pickle =
        "\x80\x04" + tensor + "\x94" + "0" + Attributes(items) + ".";
    Cost cost;
    cost.bytes = pickle.size();
    const auto parsed = Pickle::Parse(AsBytes(pickle), UnknownNames::kRecord);
    EXPECT_TRUE(parsed.ok()) << parsed.status().ToString();
    if (!parsed.ok()) return cost;
    Budget budget("the pickle", pickle.size());
    const auto values = parsed->root().items();
    for (size_t i = 1; i < values.size(); i += 2) {
      EXPECT_TRUE(IsTorchTensor(values[i]));
      const Status found =
          ReadTorchDTensor(FindTorchRebuild(values[i]), &budget).status();
      if (found.kind() == ErrorKind::kExhausted) {
        cost.status = found;
        break;
      }
      EXPECT_EQ(found.ok(), count == 1) << found.ToString();
    }
    cost.steps = budget.steps();
    return cost;
  };
  ExpectLinear([&](size_t n) { return read(n, n); }, 1500);
  // Some 8,000 tensors are looked at before that is too much, with an order of
  // one as with one of 30,000: that took thirty times as long when each of
  // it was looked at for each tensor, which no step counted.
  const auto seconds = [&](size_t count) {
    return LeastCpuSeconds([&] {
      EXPECT_EQ(read(30'000, count).status.kind(), ErrorKind::kExhausted);
    });
  };
  const double one = seconds(1), all = seconds(30'000);
  if (!kSanitized) {
    EXPECT_LT(all, 10 * one);
  }
}

// Each that is tied to it says the name of the first one, of 60 KB.
TEST(TorchLeavesTest, NamesOfTiedTensorsAreBounded) {
  const auto add = [](size_t tied) {
    CatalogBuilder catalog;
    TorchLeavesAdder adder(&catalog);
    TorchLeaves found;
    for (size_t i = 0; i <= tied; ++i) {
      TorchLeaf& leaf = found.leaves.emplace_back();
      leaf.name = i == 0 ? std::string(60'000, 'k') : std::to_string(i);
      leaf.is_tensor = true;
      leaf.shape = {1};
      leaf.placements.emplace_back().box = Box::Whole(leaf.shape);
    }
    return adder.Add(0, "a.pt", found);
  };
  EXPECT_TRUE(add(200).ok());
  EXPECT_EQ(add(400).kind(), ErrorKind::kExhausted);
}

TEST(TorchLeavesTest, ContainersOfManyFilesAreUnitedInTheTimeOfTheirKeys) {
  const auto add = [](size_t files) {
    CatalogBuilder catalog;
    TorchLeavesAdder adder(&catalog);
    Cost cost;
    for (size_t i = 0; i < files && cost.status.ok(); ++i) {
      TorchLeaves found;
      StateContainer& root = found.containers.emplace_back();
      root.path = "[]";
      root.kind = "dict";
      for (size_t k = 0; k < 10; ++k) {
        std::string& key = root.keys.emplace_back("\"");
        key += std::to_string(1000000 + 10 * i + k) + "\"";
        cost.bytes += key.size();
      }
      cost.status = adder.Add(static_cast<uint32_t>(i), "file", found);
    }
    cost.steps = adder.steps();
    return cost;
  };
  ExpectLinear(add, 300);
}

// A tuple of two the same, of two the same, ...: n levels are 2^n values.
TEST(TorchLeavesTest, LookingForHiddenTensorsIsBounded) {
  std::string bytes("\x80\x02)", 3);
  for (int i = 0; i < 60; ++i) {
    bytes += 'q';
    bytes += static_cast<char>(i);
    bytes += 'h';
    bytes += static_cast<char>(i);
    bytes += '\x86';
  }
  bytes += '.';
  const auto pickle = Pickle::Parse(AsBytes(bytes), UnknownNames::kRecord);
  ASSERT_TRUE(pickle.ok()) << pickle.status().ToString();
  Budget budget("the pickle", bytes.size());
  EXPECT_NE(FindHiddenTensor(pickle->root(), &budget), "");
  // It is for all leaves together.
  EXPECT_FALSE(budget.Step());
}

}  // namespace
}  // namespace torch_ckpt
