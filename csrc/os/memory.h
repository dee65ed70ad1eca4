// Anonymous memory of the process, by the system's calls.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace torch_ckpt {

// `bytes` of zeroed memory at a multiple of `alignment`, none of its pages
// present yet, kept out of forked children. Huge pages are asked for. The
// caller unmaps it. kExhausted when the system gives none; then nothing is
// mapped. REQUIRES: both are multiples of the page size, and `alignment` is a
// power of two.
Result<std::byte*> MapMemory(size_t bytes, size_t alignment);

// Any range of pages that MapMemory has given. False, and it is all still
// there, where that would cut a mapping in two and the process has as many of
// them as it may (vm.max_map_count).
bool UnmapMemory(std::byte* data, size_t bytes);

// Makes every page of what MapMemory has given present, before anybody writes
// to them. kExhausted when the system gives no memory; some are present then.
Status MakePresent(std::byte* data, size_t bytes);

// Asks for huge pages in any memory of the process, as far as they are wholly
// inside. Speed only: giving and clearing small ones takes as long as reading a
// file into them.
void PreferHugePages(std::byte* data, size_t bytes);

// Asks for small pages from now on; what is present stays as it is. Speed only.
void PreferSmallPages(std::byte* data, size_t bytes);

namespace internal {  // for the files of os/ only

inline constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

// Below 0 with errno on failure. Its fault point is "madvise" of the advice's
// number.
int Advise(std::byte* data, size_t bytes, int advice);

// Makes pages present, before anybody writes to them, by kPopulateWrite. 0, or
// an errno: ENOSYS from every kernel and sandbox that has not got the call.
int Populate(std::byte* data, size_t bytes);

}  // namespace internal

}  // namespace torch_ckpt
