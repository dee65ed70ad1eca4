// Tensors of this process's memory, one after another: the bytes of a file to
// be written or of a region to be staged into.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "base/box.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/dtype.h"
#include "runtime/cuda_copy.h"

namespace torch_ckpt {

// Bytes in this process or on one of its devices. `strides` are bytes per
// element step of each dimension; dense row-major sources are recognised, and
// device memory must be dense. The caller keeps the memory alive and unchanged
// until the job has returned, and has waited for the kernels that fill it.
struct SourceTensor {
  const std::byte* data = nullptr;
  Dims sizes;
  Dims strides;
  int64_t element_bytes = 1;
  int device = -1;  // CUDA device, counted as torch does; -1: host memory

  uint64_t bytes() const;
  bool IsDense() const;  // row-major, without gaps
};

using DeviceMap = std::map<int, CudaDevice*>;

// The devices that sources lie on. kInvalidArgument for device memory that is
// not dense, kUnsupported where CUDA's driver is not usable.
Result<DeviceMap> DevicesOf(const std::vector<SourceTensor>& sources);

// Elements that are written as elements of another type.
struct ElementCast {
  Dtype from;
  Dtype to;
};

// A part of one text or source, or zeros between them.
struct SourcePart {
  const SourceTensor* source;  // null: text or zeros
  // Of its bytes as they are written (after a cast), in row-major order
  // whatever the strides.
  uint64_t begin;
  uint64_t size;
  const std::byte* dense;   // where they lie in host memory in a row, or null
  const ElementCast* cast;  // null: none
};

// Makes the bytes of a part whose source is in host memory, but which do not
// lie there in a row as they are to be written.
void GatherPart(const SourcePart& part, std::byte* to);

// Makes them of `elements`, the whole source elements that the part touches,
// dense: elements [first, ...) of the source. REQUIRES: there is a cast.
void CastPart(const SourcePart& part, const std::byte* elements, uint64_t first,
              std::byte* to);
// Which elements of its source the part touches, whole or not.
struct ElementRange {
  uint64_t first = 0, last = 0;
};
ElementRange CastElementsOf(const SourcePart& part);

// What is appended must stay where it is. Reading is thread-safe.
class SourceBytes {
 public:
  void Reserve(size_t parts) { extents_.reserve(parts); }
  void Append(std::string_view text);
  void Append(const SourceTensor& source);  // nothing where it has no bytes
  // Bytes [from, from + bytes) of the source in row-major order, as they are
  // after `cast`, at `at`, which is not before the end: what is between is
  // nowhere, and not to be asked for.
  void Place(uint64_t at, const SourceTensor& source, uint64_t from,
             uint64_t bytes, std::optional<ElementCast> cast = {});
  void AlignTo(uint64_t unit);  // zeros up to a multiple of `unit`
  uint64_t size() const { return extents_.empty() ? 0 : extents_.back().end; }

  // Calls fn(part) -> Status for the parts of [begin, begin + bytes) in their
  // order, until one fails. REQUIRES: begin + bytes <= size().
  template <class Fn>
  Status ForEachPart(uint64_t begin, uint64_t bytes, const Fn& fn) const;

 private:
  struct Extent {
    uint64_t begin = 0;
    uint64_t end = 0;
    const SourceTensor* source = nullptr;
    uint64_t from = 0;                 // of the source's bytes
    const std::byte* dense = nullptr;  // where that one lies
    std::optional<ElementCast> cast;
  };
  std::vector<Extent> extents_;  // ascending
};

template <class Fn>
Status SourceBytes::ForEachPart(uint64_t begin, uint64_t bytes,
                                const Fn& fn) const {
  auto extent =
      std::upper_bound(extents_.begin(), extents_.end(), begin,
                       [](uint64_t at, const Extent& e) { return at < e.end; });
  while (bytes > 0) {
    const uint64_t inside = begin - extent->begin;
    const uint64_t size = std::min(bytes, extent->end - begin);
    const SourcePart part{extent->source, extent->from + inside, size,
                          extent->dense ? extent->dense + inside : nullptr,
                          extent->cast ? &*extent->cast : nullptr};
    TC_RETURN_IF_ERROR(fn(part));
    begin += size;
    bytes -= size;
    ++extent;
  }
  return {};
}

}  // namespace torch_ckpt
