// Anonymous memory of the process, by the system's calls.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace torch_ckpt {

// `bytes` of zeroed memory at a multiple of `alignment`, every page of it
// present, on huge pages where the kernel has them, and kept out of forked
// children. The caller unmaps it. kExhausted when the system gives none; then
// nothing is mapped. REQUIRES: both are multiples of the page size, and
// `alignment` is a power of two.
Result<std::byte*> MapMemory(size_t bytes, size_t alignment);

// Any range of pages that MapMemory has given.
void UnmapMemory(std::byte* data, size_t bytes);

namespace internal {  // for the files of os/ only

inline constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

// Below 0 with errno on failure.
int Advise(std::byte* data, size_t bytes, int advice);

}  // namespace internal

}  // namespace torch_ckpt
