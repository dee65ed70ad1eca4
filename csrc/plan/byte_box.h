// A box of a row-major tensor, in bytes. In the order of the tensor the bytes
// of the box are in the box's own row-major order, so that the part of it in
// any stretch of the tensor is one stretch of the box.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"

namespace torch_ckpt {

class ByteBox {
 public:
  // REQUIRES: the box is inside the shape. kUnsupported for a box that cuts a
  // byte of packed elements.
  static Result<ByteBox> Make(Dtype dtype, const Dims& shape, const Box& box);

  uint64_t size() const { return size_; }
  // Whether its bytes are one stretch of the tensor.
  bool InARow() const;
  // How many bytes of the box lie before byte `at` of the tensor. REQUIRES: the
  // tensor has bytes.
  uint64_t Before(uint64_t at) const;
  // Calls fn(at, bytes) for the stretches of the tensor, ascending, that bytes
  // [from, from + bytes) of the box are.
  template <class Fn>
  void ForEachRow(uint64_t from, uint64_t bytes, const Fn& fn) const;
  // Copies these from `src` to where they belong, when byte `origin` of the
  // tensor is at `dst`.
  void Scatter(uint64_t from, uint64_t bytes, const std::byte* src,
               std::byte* dst, uint64_t origin) const;

 private:
  // Outermost first; the last is counted in bytes. A dimension that the box
  // fills is folded, with all behind it, into the one before.
  struct Dimension {
    uint64_t offset, size;
    uint64_t tensor_stride, box_stride;  // bytes a step
  };
  int count_ = 0;
  std::array<Dimension, kMaxDims + 1> dims_{};
  uint64_t size_ = 0;
};

template <class Fn>
void ByteBox::ForEachRow(uint64_t from, uint64_t bytes, const Fn& fn) const {
  if (bytes == 0) return;
  const Dimension& row = dims_[static_cast<size_t>(count_ - 1)];
  std::array<uint64_t, kMaxDims + 1> index{};  // of the row
  uint64_t begin = row.offset;
  for (int d = 0; d + 1 < count_; ++d) {
    const Dimension& dim = dims_[static_cast<size_t>(d)];
    uint64_t& of_dim = index[static_cast<size_t>(d)];
    of_dim = from / dim.box_stride;
    from %= dim.box_stride;
    begin += (dim.offset + of_dim) * dim.tensor_stride;
  }
  for (;;) {
    const uint64_t part = std::min(bytes, row.size - from);
    fn(begin + from, part);
    bytes -= part;
    if (bytes == 0) return;
    from = 0;
    for (int d = count_ - 2; d >= 0; --d) {
      const Dimension& dim = dims_[static_cast<size_t>(d)];
      begin += dim.tensor_stride;
      if (++index[static_cast<size_t>(d)] < dim.size) break;
      index[static_cast<size_t>(d)] = 0;
      begin -= dim.size * dim.tensor_stride;
    }
  }
}

}  // namespace torch_ckpt
