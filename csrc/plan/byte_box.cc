#include "plan/byte_box.h"

#include <cstring>

namespace torch_ckpt {

Result<ByteBox> ByteBox::Make(Dtype dtype, const Dims& shape, const Box& box) {
  TC_ASSIGN_OR_RETURN(const UnitView view, InUnits(dtype, shape, box));
  ByteBox made;
  const auto unit = static_cast<uint64_t>(view.unit_bytes);
  // From the bytes of a unit outwards.
  uint64_t offset = 0, size = unit, extent = unit;
  uint64_t tensor_stride = 1, box_stride = 1;
  const auto put = [&] {
    made.dims_[static_cast<size_t>(made.count_++)] = {
        offset, size, tensor_stride, box_stride};
    box_stride *= size;
    tensor_stride *= extent;
  };
  for (int d = view.shape.size() - 1; d >= 0; --d) {
    const auto of_offset = static_cast<uint64_t>(view.box.offsets[d]);
    const auto of_size = static_cast<uint64_t>(view.box.sizes[d]);
    const auto of_extent = static_cast<uint64_t>(view.shape[d]);
    if (offset == 0 && size == extent) {
      offset = of_offset * extent;
      size = of_size * extent;
      extent *= of_extent;
      continue;
    }
    put();
    offset = of_offset;
    size = of_size;
    extent = of_extent;
  }
  put();
  std::reverse(made.dims_.begin(), made.dims_.begin() + made.count_);
  made.size_ = box_stride;
  return made;
}

bool ByteBox::InARow() const {
  return std::all_of(dims_.begin(), dims_.begin() + count_ - 1,
                     [](const Dimension& dim) { return dim.size == 1; });
}

uint64_t ByteBox::Before(uint64_t at) const {
  uint64_t before = 0;
  for (int d = 0; d < count_; ++d) {
    const Dimension& dim = dims_[static_cast<size_t>(d)];
    const uint64_t index = at / dim.tensor_stride;
    at %= dim.tensor_stride;
    if (index < dim.offset) return before;
    if (index >= dim.offset + dim.size) {
      return before + dim.size * dim.box_stride;
    }
    before += (index - dim.offset) * dim.box_stride;
  }
  return before;
}

void ByteBox::Scatter(uint64_t from, uint64_t bytes, const std::byte* src,
                      std::byte* dst, uint64_t origin) const {
  ForEachRow(from, bytes, [&](uint64_t at, uint64_t part) {
    std::memcpy(dst + (at - origin), src, part);
    src += part;
  });
}

}  // namespace torch_ckpt
