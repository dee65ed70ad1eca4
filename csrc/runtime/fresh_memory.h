// Memory that nobody has touched, given by the system to those who fill it.
//
// The system gives a page when it is first touched, and takes its time: where
// a virtual machine has never used the page before, its host has to give it
// first. Measured on such a machine with two cores (Linux 6.18), GB/s of giving
// pages and copying into them, with one and with two threads:
//
//                                   huge pages        4 KiB pages
//   the machine has used them       4.5   8.6         2.1   3.7
//   it has not                      0.38  0.73        0.36  0.67
//
// So two threads take half as long. Which pages are better does not follow from
// their size: the kernel makes huge ones of memory that was never used while
// it still has small ones that were (then 0.38 against 2.1). So the first of a
// region are made of either, and the rest of those that came faster.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "runtime/arena.h"

namespace torch_ckpt {

// A leased region is filled in pieces of this.
inline constexpr size_t kFillBytes = 2 * kArenaPage;

class FreshMemory {
 public:
  using Clock = std::chrono::steady_clock::time_point (*)();

  // The lease and the locker must outlive this; `locker` may be null. `now` is
  // a test's where the time that passes is.
  FreshMemory(const ArenaLease* lease, PageLocker* locker,
              Clock now = std::chrono::steady_clock::now);

  // Has the system give the pages of a piece, and page-locks them. Called
  // before the piece is filled, by the thread that will, for the pieces in
  // about ascending order. kExhausted where there is no memory; that a page
  // cannot be locked is no error.
  Status Take(int64_t piece);

 private:
  // Times and counts pieces of the trial, and ends it with the last.
  Status Try(int64_t piece, size_t begin, size_t bytes);

  const ArenaLease* const lease_;
  PageLocker* const locker_;
  const Clock now_;
  std::atomic<bool> locks_;
  bool tries_;                                  // whether there is a trial
  std::array<std::atomic<int64_t>, 2> took_{};  // ns: huge pages, small ones
  std::atomic<int64_t> left_;                   // pieces of the trial
};

}  // namespace torch_ckpt
