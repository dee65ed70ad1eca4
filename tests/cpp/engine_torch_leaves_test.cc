#include <gtest/gtest.h>

#include <string>

#include "budget_test_util.h"
#include "engine/open/torch_leaves.h"

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

}  // namespace
}  // namespace torch_ckpt
