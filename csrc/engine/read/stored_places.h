// Which elements of a tensor the bytes of its files are.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/open/stored_view.h"

namespace torch_ckpt {

// Immutable; const access is thread-safe.
class StoredPlaces {
 public:
  // kUnsupported for a tensor whose boxes are not dense.
  static Result<StoredPlaces> Of(const StoredView& view);

  // Units (format/dtype.h) that follow each other in a file and in the
  // row-major order of the tensor.
  struct Place {
    uint64_t first;  // in that order
    uint64_t units;  // from there on
  };
  // REQUIRES: the byte is the first of a unit of the tensor.
  Place Find(uint32_t file, uint64_t offset) const;

 private:
  struct PlacedBox {
    uint32_t file;
    uint64_t base;
    Box box;
    uint64_t row;  // units of it that follow each other in the tensor
  };

  std::vector<PlacedBox> boxes_;  // by file and base
  Dims strides_;                  // of the tensor, in units
  uint64_t unit_bytes_ = 1;
};

}  // namespace torch_ckpt
