// Random tensors cut at random by simulated ranks, read back as random boxes,
// merged, and compared with the arrays they came from.
#include <random>

#include "engine/read/verify_job.h"
#include "final_test_util.h"

namespace torch_ckpt {
namespace {

class RandomTest : public EngineDiskTest {
 protected:
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  Array RandomArray() {
    const auto dtype = static_cast<Dtype>(Pick(0, kDtypeCount - 1));
    Dims shape;
    const int64_t rank = Pick(0, 4);
    for (int64_t d = 0; d < rank; ++d) {
      shape.push_back(Pick(0, 9) == 0 ? 0 : Pick(1, rank < 3 ? 60 : 12));
    }
    const int64_t unit = DtypeUnit(dtype).elements;
    if (rank > 0) {
      shape[shape.size() - 1] *= unit;
    } else if (unit > 1) {
      shape.push_back(unit);
    }
    return MakeArray(dtype, shape, static_cast<uint32_t>(random_()));
  }

  // Tiles a box with up to `depth` random cuts.
  void Cut(const Array& array, const std::string& name, const Box& box,
           int depth, int64_t ranks, std::vector<Piece>* out) {
    const int rank = box.rank();
    if (depth > 0 && rank > 0) {
      const int d = static_cast<int>(Pick(0, rank - 1));
      const int64_t unit = d == rank - 1 ? DtypeUnit(array.dtype).elements : 1;
      if (box.sizes[d] / unit >= 2) {
        const int64_t at = Pick(1, box.sizes[d] / unit - 1) * unit;
        Box low = box, high = box;
        low.sizes[d] = at;
        high.offsets[d] += at;
        high.sizes[d] -= at;
        Cut(array, name, low, depth - 1, ranks, out);
        Cut(array, name, high, depth - 1, ranks, out);
        return;
      }
    }
    out->push_back({Pick(0, ranks - 1), name, &array, box});
  }

  Box RandomBox(const Array& array) {
    Box box = Box::Whole(array.shape);
    for (int d = 0; d < box.rank(); ++d) {
      const int64_t unit =
          d == box.rank() - 1 ? DtypeUnit(array.dtype).elements : 1;
      const int64_t begin = Pick(0, array.shape[d] / unit);
      box.offsets[d] = begin * unit;
      box.sizes[d] = Pick(0, array.shape[d] / unit - begin) * unit;
    }
    return box;
  }

  std::mt19937 random_;
};

TEST_F(RandomTest, WhatWasSavedIsReadAndMerged) {
  for (uint32_t seed = 0; seed < 25; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    random_.seed(seed);
    std::vector<Array> arrays;
    for (int64_t i = Pick(1, 8); i > 0; --i) arrays.push_back(RandomArray());
    std::vector<Piece> pieces;
    const int64_t ranks = Pick(1, 5);
    for (size_t i = 0; i < arrays.size(); ++i) {
      Cut(arrays[i], "t" + std::to_string(i), Box::Whole(arrays[i].shape),
          static_cast<int>(Pick(0, 4)), ranks, &pieces);
    }
    SaveSettings settings;
    settings.output.workers = static_cast<int>(Pick(1, 3));
    ASSERT_OK(SaveAll(Path("c"), pieces, settings).status());
    auto checkpoint = OpenCheckpoint(Path("c"));
    ASSERT_OK(checkpoint.status());
    for (int i = 0; i < 40; ++i) {
      const auto which =
          static_cast<size_t>(Pick(0, static_cast<int64_t>(arrays.size()) - 1));
      const Box box = RandomBox(arrays[which]);
      auto read = ReadBox(*checkpoint, "t" + std::to_string(which), box,
                          i % 3 != 0, static_cast<int>(Pick(1, 3)));
      ASSERT_OK(read.status());
      ASSERT_TRUE(*read == BoxBytes(arrays[which], box))
          << DtypeName(arrays[which].dtype) << box.ToString() << " of "
          << arrays[which].shape.ToString();
    }
    MergeSettings merge;
    merge.ranks = static_cast<int>(Pick(0, 3));
    if (Pick(0, 1) == 0) {
      for (size_t i = 0; i < arrays.size(); ++i) {
        merge.mapping.emplace_back("t" + std::to_string(i), Pick(1, 3));
      }
    }
    ASSERT_OK(Merge(Path("c"), Path("out"), merge).status());
    auto all = ReadAll(Path("out"));
    ASSERT_OK(all.status());
    for (size_t i = 0; i < arrays.size(); ++i) {
      ASSERT_TRUE(all->at("t" + std::to_string(i)) == arrays[i].bytes);
    }
    // The same pieces straight into final files are the same files.
    FinalSettings final;
    if (!merge.mapping.empty()) final.files.mapping = merge.mapping;
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (Pick(0, 2) == 0) final.gathered.push_back("t" + std::to_string(i));
    }
    final.output.direct_io = Pick(0, 1) == 0;
    ASSERT_OK(SaveFinal(Path("final"), pieces, final).status());
    auto direct = ReadAll(Path("final"));
    ASSERT_OK(direct.status());
    ASSERT_TRUE(*direct == *all);
    Job job;
    auto opened = OpenCheckpoint(Path("final"));
    ASSERT_OK(opened.status());
    ASSERT_OK(RunVerifyJob(*opened, {}, &job).status());
  }
}

}  // namespace
}  // namespace torch_ckpt
