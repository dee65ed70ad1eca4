#include "engine/source_bytes.h"

#include <cstring>

#include "base/checked.h"
#include "format/cast.h"
#include "plan/copy_run.h"
#include "plan/ranges.h"

namespace torch_ckpt {
namespace {

// Whole elements of a strided source, in row-major order, from byte `begin` of
// that order on.
void GatherElements(const SourceTensor& source, uint64_t begin,
                    MutableByteSpan out) {
  const auto unit = static_cast<uint64_t>(source.element_bytes);
  const Dims order = DenseStrides(source.sizes, source.element_bytes);
  for (const Box& box :
       BoxesOfRange(source.sizes, static_cast<int64_t>(begin / unit),
                    static_cast<int64_t>((begin + out.size()) / unit))) {
    StridedBox src{box, 0, source.strides};
    StridedBox dst{box, 0, order};
    for (int d = 0; d < box.rank(); ++d) {
      src.base += static_cast<uint64_t>(box.offsets[d] * source.strides[d]);
      dst.base += static_cast<uint64_t>(box.offsets[d] * order[d]);
    }
    Run run;
    if (MakeRun(src, dst, source.element_bytes, &run)) {
      CopyRun(run, source.data, 0, out.data(), begin);
    }
  }
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

Result<DeviceMap> DevicesOf(const std::vector<SourceTensor>& sources) {
  DeviceMap devices;
  for (const SourceTensor& source : sources) {
    if (source.device < 0 || source.bytes() == 0) continue;
    if (!source.IsDense()) {
      return InvalidArgument(
          "a tensor on a device is not contiguous; its owner gathers it");
    }
    if (devices.count(source.device) != 0) continue;
    TC_ASSIGN_OR_RETURN(devices[source.device],
                        CudaDevice::Process(source.device));
  }
  return devices;
}

ElementRange CastElementsOf(const SourcePart& part) {
  const auto bytes = static_cast<uint64_t>(DtypeBits(part.cast->to)) / 8;
  return {part.begin / bytes, (part.begin + part.size + bytes - 1) / bytes};
}

void CastPart(const SourcePart& part, const std::byte* elements, uint64_t first,
              std::byte* to) {
  const auto in = static_cast<uint64_t>(DtypeBits(part.cast->from)) / 8;
  const auto out = static_cast<uint64_t>(DtypeBits(part.cast->to)) / 8;
  const ElementRange range = CastElementsOf(part);
  const std::byte* from = elements + (range.first - first) * in;
  const uint64_t count = range.last - range.first;
  if (part.begin % out == 0 && part.size % out == 0) {
    CastElements(part.cast->from, from, part.cast->to, to, count);
    return;
  }
  // It cuts an element.
  std::vector<std::byte> whole(count * out);
  CastElements(part.cast->from, from, part.cast->to, whole.data(), count);
  std::memcpy(to, whole.data() + (part.begin - range.first * out), part.size);
}

void GatherPart(const SourcePart& part, std::byte* to) {
  if (part.source == nullptr) {
    std::memset(to, 0, part.size);
    return;
  }
  if (part.cast != nullptr) {
    if (part.source->IsDense()) {
      CastPart(part, part.source->data, 0, to);
      return;
    }
    const ElementRange range = CastElementsOf(part);
    const auto bytes = static_cast<uint64_t>(DtypeBits(part.cast->from)) / 8;
    std::vector<std::byte> elements((range.last - range.first) * bytes);
    GatherElements(*part.source, range.first * bytes, elements);
    CastPart(part, elements.data(), range.first, to);
    return;
  }
  // A part may cut an element (3-byte units, odd offsets): gather whole
  // elements and take what is asked for.
  const auto unit = static_cast<uint64_t>(part.source->element_bytes);
  const uint64_t end = part.begin + part.size;
  const uint64_t first = part.begin / unit * unit;
  const uint64_t last = (end + unit - 1) / unit * unit;
  if (first == part.begin && last == end) {
    GatherElements(*part.source, part.begin, {to, part.size});
    return;
  }
  std::vector<std::byte> whole(last - first);
  GatherElements(*part.source, first, whole);
  std::memcpy(to, whole.data() + (part.begin - first), part.size);
}

void SourceBytes::Append(std::string_view text) {
  if (text.empty()) return;
  extents_.push_back(
      {size(), size() + text.size(), nullptr, 0, AsBytes(text).data(), {}});
}

void SourceBytes::Append(const SourceTensor& source) {
  Place(size(), source, 0, source.bytes());
}

void SourceBytes::Place(uint64_t at, const SourceTensor& source, uint64_t from,
                        uint64_t bytes, std::optional<ElementCast> cast) {
  if (bytes == 0) return;
  const bool in_a_row = source.device < 0 && source.IsDense() && !cast;
  extents_.push_back({at, at + bytes, &source, from,
                      in_a_row ? source.data + from : nullptr, cast});
}

void SourceBytes::AlignTo(uint64_t unit) {
  const uint64_t end = RoundUp(size(), unit);
  if (end != size()) extents_.push_back({size(), end, nullptr, 0, nullptr, {}});
}

}  // namespace torch_ckpt
