#include "plan/packed_run.h"

namespace torch_ckpt {
namespace {

// Rows of less than kNarrow bytes are copied with what is between them, where
// that makes them no more than kHoles times as much: a device takes as long for
// a short row as for a longer one.
constexpr uint64_t kNarrow = 256;
constexpr uint64_t kHoles = 8;

// A call for each, and memory.
constexpr size_t kMostEntries = 4096;

// The same rows from every step of a loop through the source.
void Repeat(int64_t count, int64_t stride, std::vector<PackedRows>* rows) {
  const std::vector<PackedRows> once = *rows;
  rows->reserve(once.size() * static_cast<size_t>(count));
  for (int64_t i = 1; i < count; ++i) {
    for (PackedRows each : once) {
      each.from += static_cast<uint64_t>(i * stride);
      rows->push_back(each);
    }
  }
}

}  // namespace

std::optional<PackedRun> Pack(const Run& run, uint64_t max_bytes) {
  PackedRun packed;
  packed.run = run;
  packed.run.src = 0;
  packed.bytes = run.bytes;
  // From the shortest steps through the source to the longest.
  int l = run.loops - 1;
  for (; l >= 0; --l) {
    const auto i = static_cast<size_t>(l);
    const auto stride = static_cast<uint64_t>(run.src_stride[i]);
    const bool is_close = packed.bytes < kNarrow && stride > packed.bytes &&
                          stride / kHoles <= packed.bytes;
    if (stride != packed.bytes && !is_close) break;
    packed.bytes += static_cast<uint64_t>(run.count[i] - 1) * stride;
  }
  PackedRows row{run.src, packed.bytes, packed.bytes, 1};
  if (l >= 0) {
    const auto i = static_cast<size_t>(l);
    const auto stride = static_cast<uint64_t>(run.src_stride[i]);
    if (stride >= row.bytes) {
      row.pitch = stride;
      row.count = static_cast<uint64_t>(run.count[i]);
      packed.run.src_stride[i] = static_cast<int64_t>(row.bytes);
      packed.bytes *= row.count;
      --l;
    }
  }
  packed.rows = {row};
  for (; l >= 0 && run.src_stride[static_cast<size_t>(l)] != 0; --l) {
    const auto i = static_cast<size_t>(l);
    const auto count = static_cast<uint64_t>(run.count[i]);
    if (packed.bytes > max_bytes / count ||
        packed.rows.size() > kMostEntries / count) {
      return std::nullopt;
    }
    Repeat(run.count[i], run.src_stride[i], &packed.rows);
    packed.run.src_stride[i] = static_cast<int64_t>(packed.bytes);
    packed.bytes *= count;
  }
  if (packed.bytes > max_bytes) return std::nullopt;
  packed.as_wanted = packed.bytes == run.TotalBytes();
  for (size_t i = 0; i < static_cast<size_t>(run.loops); ++i) {
    packed.as_wanted =
        packed.as_wanted && packed.run.src_stride[i] == run.dst_stride[i];
  }
  return packed;
}

std::pair<Run, Run> Halved(const Run& run) {
  int level = 0;  // loops of 0 are outermost
  while (run.src_stride[static_cast<size_t>(level)] == 0) ++level;
  const int64_t count = run.count[static_cast<size_t>(level)];
  return {runs_internal::SliceLoop(run, level, 0, count / 2),
          runs_internal::SliceLoop(run, level, count / 2, count - count / 2)};
}

}  // namespace torch_ckpt
