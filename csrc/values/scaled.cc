#include "values/scaled.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "values/float_loops.h"
#include "values/float_types.h"

namespace torch_ckpt {
namespace {

// A product of a code and a scale of fewer bits than this is finite.
constexpr uint32_t kLarge = uint32_t{127 + 111} << 23;

bool IsScaleDtype(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kBF16 ||
         dtype == Dtype::kF16 || dtype == Dtype::kF8E8M0;
}

// Whether a finite one may make an infinite product.
bool AnyLarge(const float* scales, size_t count) {
  uint32_t any = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i]) & 0x7fffffffu;
    any |= magnitude - kLarge < float_types::kInfinity - kLarge ? 1u : 0u;
  }
  return any != 0;
}

uint64_t LastOf(const Dims& dims) {
  return dims.empty() ? 1 : static_cast<uint64_t>(dims[dims.size() - 1]);
}

uint64_t InfiniteOnes(const float* values, size_t count) {
  return static_cast<uint64_t>(std::count_if(
      values, values + count, [](float value) { return std::isinf(value); }));
}

}  // namespace

struct Scales::Loops {
  Loops(const FloatImplementation& of, Dtype scales, Dtype codes, Dtype to)
      : read_scales(of.loops(scales).read),
        read(of.loops(codes).read_scaled),
        write(of.loops(to).write) {}

  size_t (*const read_scales)(const std::byte*, float*, size_t);
  void (*const read)(const std::byte*, const float*, size_t, size_t, float*,
                     size_t);
  size_t (*const write)(const float*, std::byte*, size_t);
};

bool CanScale(Dtype codes, Dtype scales, Dtype to) {
  const bool is_code =
      codes == Dtype::kF8E4M3 || codes == Dtype::kF8E5M2 || codes == Dtype::kF4;
  const bool is_float = to == Dtype::kF64 || to == Dtype::kF32 ||
                        to == Dtype::kBF16 || to == Dtype::kF16;
  return is_code && IsScaleDtype(scales) && is_float;
}

Box BoxOfScales(const Box& codes, const Dims& blocks) {
  Box out = codes;
  for (int d = 0; d < codes.rank(); ++d) {
    const int64_t past = codes.offsets[d] + codes.sizes[d];
    out.offsets[d] = codes.offsets[d] / blocks[d];
    out.sizes[d] = (past + blocks[d] - 1) / blocks[d] - out.offsets[d];
  }
  return out;
}

Scales::Scales(Dtype dtype, Dims shape, Dims blocks, const Box& box)
    : dtype_(dtype),
      shape_(std::move(shape)),
      blocks_(std::move(blocks)),
      columns_(LastOf(shape_)),
      block_(LastOf(blocks_)),
      held_(BoxOfScales(box, blocks_)),
      size_(static_cast<size_t>(held_.Volume()) *
            static_cast<size_t>(DtypeBits(dtype)) / 8) {}

uint64_t Scales::RowOfScales(uint64_t row) const {
  uint64_t at = 0, stride = 1;
  for (int d = shape_.size() - 2; d >= 0; --d) {
    const auto size = static_cast<uint64_t>(shape_[d]);
    const auto block = static_cast<int64_t>(row % size) / blocks_[d];
    at += static_cast<uint64_t>(block - held_.offsets[d]) * stride;
    stride *= static_cast<uint64_t>(held_.sizes[d]);
    row /= size;
  }
  return at * LastOf(held_.sizes);
}

size_t Scales::ScaleRow(const Loops& loops, const std::byte* source,
                        size_t bits, std::byte* target, size_t target_bytes,
                        uint64_t row, uint64_t column, uint64_t count) const {
  const uint64_t of_row = RowOfScales(row);
  const uint64_t first_held = LastOf(held_.offsets) * (shape_.empty() ? 0 : 1);
  const size_t scale_bytes = static_cast<size_t>(DtypeBits(dtype_)) / 8;
  std::array<float, kFloatsAtOnce + 1> scales;
  std::array<float, kFloatsAtOnce> values;
  size_t lost = 0;
  for (uint64_t done = 0; done < count;) {
    const size_t size = std::min<uint64_t>(kFloatsAtOnce, count - done);
    const uint64_t at = column + done;
    const uint64_t block = at / block_;
    const size_t needed = (at + size - 1) / block_ - block + 1;
    const std::byte* const stored =
        bytes_.data() + (of_row + block - first_held) * scale_bytes;
    for (size_t s = 0; s < needed; s += kFloatsAtOnce) {
      loops.read_scales(stored + s * scale_bytes, scales.data() + s,
                        std::min(kFloatsAtOnce, needed - s));
    }
    const std::byte* const codes = source + done * bits / 8;
    loops.read(codes, scales.data(), at % block_, block_, values.data(), size);
    if (AnyLarge(scales.data(), needed)) {
      // What is infinite though its code is not.
      std::array<float, kFloatsAtOnce + 1> ones;
      std::array<float, kFloatsAtOnce> plain;
      std::transform(
          scales.data(), scales.data() + needed, ones.data(),
          [](float scale) { return std::isfinite(scale) ? 1 : scale; });
      loops.read(codes, ones.data(), at % block_, block_, plain.data(), size);
      lost +=
          InfiniteOnes(values.data(), size) - InfiniteOnes(plain.data(), size);
    }
    lost += loops.write(values.data(), target + done * target_bytes, size);
    done += size;
  }
  return lost;
}

size_t Scales::ScaleWith(const Loops& loops, const std::byte* source,
                         size_t bits, std::byte* target, size_t target_bytes,
                         uint64_t first, uint64_t count) const {
  size_t lost = 0;
  for (uint64_t done = 0; done < count;) {
    const uint64_t at = first + done;
    const uint64_t size = std::min(count - done, columns_ - at % columns_);
    lost += ScaleRow(loops, source + done * bits / 8, bits,
                     target + done * target_bytes, target_bytes, at / columns_,
                     at % columns_, size);
    done += size;
  }
  return lost;
}

size_t Scales::Scale(Dtype codes, const std::byte* source, Dtype to,
                     std::byte* target, uint64_t first, uint64_t count) const {
  const Loops loops(FloatImplementations().front(), dtype_, codes, to);
  return ScaleWith(loops, source, static_cast<size_t>(DtypeBits(codes)), target,
                   static_cast<size_t>(DtypeBits(to)) / 8, first, count);
}

std::optional<size_t> ScaleBy(std::string_view implementation,
                              const Scales& scales, Dtype codes,
                              const std::byte* source, Dtype to,
                              std::byte* target, uint64_t first,
                              uint64_t count) {
  for (const FloatImplementation& one : FloatImplementations()) {
    if (implementation != one.name) continue;
    return scales.ScaleWith(Scales::Loops(one, scales.dtype_, codes, to),
                            source, static_cast<size_t>(DtypeBits(codes)),
                            target, static_cast<size_t>(DtypeBits(to)) / 8,
                            first, count);
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
