#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "format/name_index.h"

namespace torch_ckpt {
namespace {

TEST(NameIndex, AgreesWithAMap) {
  std::mt19937 random(7);
  std::vector<std::string> names;
  const auto name_at = [&](uint32_t i) -> const std::string& {
    return names[i];
  };
  std::map<std::string, uint32_t> known;
  NameIndex index;
  EXPECT_EQ(index.Find("", name_at), -1);
  for (int i = 0; i < 20000; ++i) {
    // Half of them twice, and the empty name too.
    const auto value = static_cast<uint32_t>(random() % 8000);
    const std::string name = value ? "layer." + std::to_string(value) : "";
    const auto next = static_cast<uint32_t>(names.size());
    const auto [at, fresh] = known.try_emplace(name, next);
    EXPECT_EQ(index.Find(name, name_at),
              fresh ? -1 : static_cast<int64_t>(at->second));
    EXPECT_EQ(index.Insert(name, next, name_at), at->second);
    if (fresh) names.push_back(name);
  }
  for (const auto& [name, position] : known) {
    EXPECT_EQ(index.Find(name, name_at), static_cast<int64_t>(position));
  }
  EXPECT_EQ(index.Find("layer.8000", name_at), -1);
}

}  // namespace
}  // namespace torch_ckpt
