// What the tests of the commit share: a directory "c" that holds an old or a
// new tensor "a".
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/commit.h"
#include "engine_test_util.h"

namespace torch_ckpt {

class CommitTest : public EngineTest {
 protected:
  std::vector<Piece> Pieces(const Array& a) {
    return GridPieces("a", a, {2, 1});
  }
  void ExpectHolds(const Array& a) {
    auto all = ReadAll(Path("c"));
    ASSERT_OK(all.status());
    EXPECT_EQ(all->at("a"), a.bytes);
  }
  void ExpectNoStaging() {
    for (const std::string& folder : {root(), Path("c")}) {
      for (const std::string& name : Names(folder)) {
        EXPECT_FALSE(name.ends_with(kStageSuffix)) << folder << "/" << name;
      }
    }
  }
  const Array old_ = MakeArray(Dtype::kF32, {10, 4}, 1);
  const Array new_ = MakeArray(Dtype::kF32, {10, 4}, 2);
};

}  // namespace torch_ckpt
