#include "plan/copy_run.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

namespace torch_ckpt {
namespace {

// The two innermost loops, with the position of their first copy.
struct Plane {
  int64_t rows, cols;
  int64_t src_row, src_col;
  int64_t dst_row, dst_col;
  size_t bytes;
};
using CopyPlane = void (*)(const Plane&, const std::byte*, std::byte*);

void CopyLong(const Plane& p, const std::byte* src, std::byte* dst) {
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_row, dst += p.dst_row) {
    const std::byte* s = src;
    std::byte* d = dst;
    for (int64_t c = 0; c < p.cols; ++c, s += p.src_col, d += p.dst_col) {
      std::memcpy(d, s, p.bytes);
    }
  }
}

// Any length from kHalf to 2 * kHalf as two copies that may overlap: cheaper
// than the call of memcpy.
template <size_t kHalf>
void CopyShort(const Plane& p, const std::byte* src, std::byte* dst) {
  const size_t tail = p.bytes - kHalf;
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_row, dst += p.dst_row) {
    const std::byte* s = src;
    std::byte* d = dst;
    for (int64_t c = 0; c < p.cols; ++c, s += p.src_col, d += p.dst_col) {
      std::array<std::byte, kHalf> head_bytes, tail_bytes;
      std::memcpy(head_bytes.data(), s, kHalf);
      std::memcpy(tail_bytes.data(), s + tail, kHalf);
      std::memcpy(d, head_bytes.data(), kHalf);
      std::memcpy(d + tail, tail_bytes.data(), kHalf);
    }
  }
}

template <size_t kSize>
void CopyElements(const Plane& p, const std::byte* src, std::byte* dst) {
  for (int64_t r = 0; r < p.rows; ++r, src += p.src_row, dst += p.dst_row) {
    const std::byte* s = src;
    std::byte* d = dst;
    for (int64_t c = 0; c < p.cols; ++c, s += p.src_col, d += p.dst_col) {
      std::memcpy(d, s, kSize);
    }
  }
}

template <size_t kSize>
struct Element {
  std::array<std::byte, kSize> bytes;
};

// A transpose: columns are close together in src, rows in dst. Blocks of a
// cache line's width go through a small buffer, so that each line of either
// side is used up at once, whatever the strides (powers of two map all rows of
// a block to one cache set).
template <size_t kSize>
void TransposeElements(const Plane& p, const std::byte* src, std::byte* dst) {
  constexpr int64_t kSide = std::max<int64_t>(64 / kSize, 8);
  using Line = std::array<Element<kSize>, kSide>;
  constexpr int64_t kDense = kSize;
  std::array<Line, kSide> block;  // a line per column
  for (int64_t r0 = 0; r0 < p.rows; r0 += kSide) {
    const int64_t rows = std::min(kSide, p.rows - r0);
    for (int64_t c0 = 0; c0 < p.cols; c0 += kSide) {
      const int64_t cols = std::min(kSide, p.cols - c0);
      const std::byte* s = src + r0 * p.src_row + c0 * p.src_col;
      std::byte* d = dst + r0 * p.dst_row + c0 * p.dst_col;
      const bool full = rows == kSide && cols == kSide;
      if (full && p.src_col == kDense && p.dst_row == kDense) {
        for (size_t r = 0; r < kSide; ++r, s += p.src_row) {
          for (size_t c = 0; c < kSide; ++c) {
            std::memcpy(&block[c][r], s + c * kSize, kSize);
          }
        }
        for (size_t c = 0; c < kSide; ++c, d += p.dst_col) {
          std::memcpy(d, &block[c], sizeof(Line));
        }
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          std::memcpy(&block[static_cast<size_t>(c)][static_cast<size_t>(r)],
                      s + r * p.src_row + c * p.src_col, kSize);
        }
      }
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(d + r * p.dst_row + c * p.dst_col,
                      &block[static_cast<size_t>(c)][static_cast<size_t>(r)],
                      kSize);
        }
      }
    }
  }
}

CopyPlane ChooseCopy(uint64_t bytes) {
  switch (bytes) {
    case 1:
      return CopyElements<1>;
    case 2:
      return CopyElements<2>;
    case 4:
      return CopyElements<4>;
    case 8:
      return CopyElements<8>;
    case 16:
      return CopyElements<16>;
    default:
      break;
  }
  if (bytes < 4) return CopyShort<2>;
  if (bytes < 8) return CopyShort<4>;
  if (bytes < 16) return CopyShort<8>;
  if (bytes <= 32) return CopyShort<16>;
  if (bytes <= 64) return CopyShort<32>;
  return CopyLong;
}

CopyPlane ChooseTranspose(uint64_t bytes) {
  switch (bytes) {
    case 1:
      return TransposeElements<1>;
    case 2:
      return TransposeElements<2>;
    case 4:
      return TransposeElements<4>;
    case 8:
      return TransposeElements<8>;
    case 16:
      return TransposeElements<16>;
    default:
      return nullptr;
  }
}

// Moves the loop that is densest in dst next to the innermost one, which is
// densest in src. False when the innermost is the densest on both sides.
bool PairForTranspose(Run* run) {
  const size_t last = static_cast<size_t>(run->loops) - 1;
  size_t densest = last;
  for (size_t l = 0; l < last; ++l) {
    if (run->dst_stride[l] < run->dst_stride[densest]) densest = l;
  }
  if (densest == last) return false;
  for (size_t l = densest; l + 1 < last; ++l) {
    std::swap(run->count[l], run->count[l + 1]);
    std::swap(run->src_stride[l], run->src_stride[l + 1]);
    std::swap(run->dst_stride[l], run->dst_stride[l + 1]);
  }
  return true;
}

// Calls `copy` for every iteration of the loops outside the innermost two.
void ForEachPlane(const Run& run, CopyPlane copy, const std::byte* src,
                  std::byte* dst) {
  const size_t loops = static_cast<size_t>(run.loops);
  const size_t last = loops - 1;
  Plane plane{1,
              run.count[last],
              0,
              run.src_stride[last],
              0,
              run.dst_stride[last],
              static_cast<size_t>(run.bytes)};
  if (loops >= 2) {
    plane.rows = run.count[last - 1];
    plane.src_row = run.src_stride[last - 1];
    plane.dst_row = run.dst_stride[last - 1];
  }
  std::array<int64_t, kMaxDims> at{};
  while (true) {
    copy(plane, src, dst);
    size_t l = loops > 2 ? loops - 2 : 0;
    while (l > 0) {
      --l;
      if (++at[l] < run.count[l]) {
        src += run.src_stride[l];
        dst += run.dst_stride[l];
        break;
      }
      at[l] = 0;
      src -= (run.count[l] - 1) * run.src_stride[l];
      dst -= (run.count[l] - 1) * run.dst_stride[l];
      if (l == 0) return;
    }
    if (loops <= 2) return;
  }
}

}  // namespace

void CopyRun(const Run& run, const std::byte* src_base, uint64_t src_origin,
             std::byte* dst_base, uint64_t dst_origin) {
  const std::byte* src = src_base + (run.src - src_origin);
  std::byte* dst = dst_base + (run.dst - dst_origin);
  if (run.loops == 0) {
    std::memcpy(dst, src, static_cast<size_t>(run.bytes));
    return;
  }
  if (run.loops >= 2 && run.bytes <= 16) {
    if (const CopyPlane transpose = ChooseTranspose(run.bytes)) {
      Run paired = run;
      if (PairForTranspose(&paired)) {
        ForEachPlane(paired, transpose, src, dst);
        return;
      }
    }
  }
  ForEachPlane(run, ChooseCopy(run.bytes), src, dst);
}

}  // namespace torch_ckpt
