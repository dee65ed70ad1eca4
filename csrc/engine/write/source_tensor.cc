#include "engine/write/source_tensor.h"

#include <cstring>
#include <vector>

#include "base/checked.h"
#include "plan/copy_run.h"
#include "plan/ranges.h"

namespace torch_ckpt {
namespace {

// The same of whole elements.
uint64_t GatherElements(const SourceTensor& source, uint64_t from,
                        MutableByteSpan out) {
  uint64_t copied = 0;
  for (const Run& run : RunsOf(source, from, out.size())) {
    CopyRun(run, source.data, 0, out.data(), 0);
    copied += run.TotalBytes();
  }
  return copied;
}

}  // namespace

uint64_t SourceTensor::bytes() const {
  return static_cast<uint64_t>(sizes.Product()) *
         static_cast<uint64_t>(element_bytes);
}

bool SourceTensor::IsDense() const {
  int64_t expected = element_bytes;
  for (int d = sizes.size() - 1; d >= 0; --d) {
    if (sizes[d] == 0) return true;
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

uint64_t SourceTensor::Span() const {
  uint64_t last = 0;
  for (int d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += static_cast<uint64_t>((sizes[d] - 1) * strides[d]);
  }
  return last + static_cast<uint64_t>(element_bytes);
}

std::vector<Run> RunsOf(const SourceTensor& source, uint64_t from,
                        uint64_t bytes) {
  std::vector<Run> runs;
  const auto unit = static_cast<uint64_t>(source.element_bytes);
  const Dims order = DenseStrides(source.sizes, source.element_bytes);
  for (const Box& box :
       BoxesOfRange(source.sizes, static_cast<int64_t>(from / unit),
                    static_cast<int64_t>((from + bytes) / unit))) {
    StridedBox src{box, 0, source.strides};
    StridedBox dst{box, 0, order};
    for (int d = 0; d < box.rank(); ++d) {
      src.base += static_cast<uint64_t>(box.offsets[d] * source.strides[d]);
      dst.base += static_cast<uint64_t>(box.offsets[d] * order[d]);
    }
    dst.base -= from;
    Run run;
    if (MakeRun(src, dst, source.element_bytes, &run)) runs.push_back(run);
  }
  return runs;
}

uint64_t Gather(const SourceTensor& source, uint64_t from,
                MutableByteSpan out) {
  // It may cut an element (3-byte units, odd offsets): then whole ones are
  // gathered, and what is asked for is taken of them.
  const auto unit = static_cast<uint64_t>(source.element_bytes);
  const uint64_t first = RoundDown(from, unit);
  const uint64_t last = RoundUp(from + out.size(), unit);
  if (first == from && last == from + out.size()) {
    return GatherElements(source, from, out);
  }
  std::vector<std::byte> whole(last - first);
  const uint64_t copied = GatherElements(source, first, whole);
  std::memcpy(out.data(), whole.data() + (from - first), out.size());
  return copied == whole.size() ? out.size() : 0;
}

}  // namespace torch_ckpt
