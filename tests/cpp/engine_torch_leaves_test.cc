#include <gtest/gtest.h>

#include <string>

#include "base/bytes.h"
#include "budget_test_util.h"
#include "engine/open/torch_leaves.h"
#include "format/pickle.h"
#include "format/torch_unread.h"

namespace torch_ckpt {
namespace {

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
