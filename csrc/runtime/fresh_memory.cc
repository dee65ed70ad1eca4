#include "runtime/fresh_memory.h"

#include <algorithm>

#include "os/memory.h"

namespace torch_ckpt {
namespace {

// Of each size of page; enough to look past one slow piece.
constexpr int64_t kTrial = 4;
constexpr size_t kTrialBytes = 2 * kTrial * kFillBytes;
// Smaller regions are not worth a trial.
constexpr size_t kWorthIt = 4 * kTrialBytes;
// Small pages have to come this much faster: whoever uses the region again is
// better served by huge ones.
constexpr int64_t kMuchFaster = 2;

// Under a hypervisor, the tables of pages that are present may be filled in
// only now.
void Touch(std::byte* data, size_t bytes) {
  constexpr size_t kSmallPage = 4096;
  for (size_t at = 0; at < bytes; at += kSmallPage) {
    *const_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
}

}  // namespace

FreshMemory::FreshMemory(const ArenaLease* lease, PageLocker* locker, Clock now)
    : lease_(lease),
      locker_(locker),
      now_(now),
      locks_(locker != nullptr),
      tries_(lease->size() >= kWorthIt && lease->absent() == lease->size()),
      left_(2 * kTrial) {
  if (tries_) {
    PreferSmallPages(lease->data() + kTrialBytes / 2, kTrialBytes / 2);
  }
}

Status FreshMemory::Take(int64_t piece) {
  const size_t begin = static_cast<size_t>(piece) * kFillBytes;
  const size_t bytes = std::min(kFillBytes, lease_->size() - begin);
  if (tries_ && piece < 2 * kTrial) {
    TC_RETURN_IF_ERROR(Try(piece, begin, bytes));
  } else {
    TC_RETURN_IF_ERROR(lease_->MakePresent(begin, bytes));
  }
  // Speed only: a system may forbid or limit locked memory. Then it says so
  // once.
  if (locks_ && !lease_->PageLock(locker_, begin, bytes).ok()) locks_ = false;
  return {};
}

Status FreshMemory::Try(int64_t piece, size_t begin, size_t bytes) {
  const auto start = now_();
  TC_RETURN_IF_ERROR(lease_->MakePresent(begin, bytes));
  Touch(lease_->data() + begin, bytes);
  took_[piece < kTrial ? 0 : 1] +=
      std::chrono::nanoseconds(now_() - start).count();
  // The one that ends the trial changes the rest, which others may have begun
  // on: what is present stays as it is.
  if (--left_ == 0 && took_[0] > kMuchFaster * took_[1]) {
    PreferSmallPages(lease_->data() + kTrialBytes,
                     lease_->size() - kTrialBytes);
  }
  return {};
}

}  // namespace torch_ckpt
