// Sources of a job: boxes of arrays.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "engine/write/source_tensor.h"
#include "engine_test_util.h"

namespace torch_ckpt {

// Memory with a box of an array: a row-major copy of it, or the box where it
// lies in the whole array.
class MemoryBoxes {
 public:
  void Add(const Array& array, const Box& box, bool dense) {
    const int64_t unit = DtypeBits(array.dtype) / 8;
    SourceTensor& source = sources.emplace_back();
    source.element_bytes = unit;
    source.sizes = box.sizes;
    source.strides = box.sizes;  // as many
    const Dims& outer = dense ? box.sizes : array.shape;
    int64_t stride = unit, before = 0;
    for (int d = outer.size() - 1; d >= 0; --d) {
      source.strides[d] = stride;
      if (!dense) before += box.offsets[d] * stride;
      stride *= outer[d];
    }
    if (dense) texts_.push_back(BoxBytes(array, box));
    const std::string& text = dense ? texts_.back() : array.bytes;
    source.data = reinterpret_cast<const std::byte*>(text.data()) + before;
  }

  std::vector<SourceTensor> sources;

 private:
  std::deque<std::string> texts_;
};

}  // namespace torch_ckpt
