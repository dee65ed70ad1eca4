// The kernels that carry out a run in memory, transposes among them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/runs.h"

namespace torch_ckpt {

// Executes a run between two buffers: copies from src_base + (run.src -
// src_origin) to dst_base + (run.dst - dst_origin). Short contiguous lengths
// (1..16 bytes) take a typed path. The caller has proved all bounds.
void CopyRun(const Run& run, const std::byte* src_base, uint64_t src_origin,
             std::byte* dst_base, uint64_t dst_origin);

}  // namespace torch_ckpt
