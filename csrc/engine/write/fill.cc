#include "engine/write/fill.h"

#include <algorithm>

namespace torch_ckpt {

Providers::Providers(const std::vector<const ExtentList*>& lists) {
  for (const ExtentList* list : lists) {
    for (const Extent& extent : list->extents()) {
      Provider* const provider = extent.origin.provider;
      // Neighbours have the same one, mostly.
      if (!all_.empty() && all_.back() == provider) continue;
      const auto found = std::find(all_.begin(), all_.end(), provider);
      if (found != all_.end()) {
        std::swap(*found, all_.back());
        continue;
      }
      all_.push_back(provider);
      scratch_bytes_ = std::max(scratch_bytes_, provider->ScratchBytes());
    }
  }
}

PageLocker* Providers::locker() const {
  for (const Provider* provider : all_) {
    if (provider->Locker() != nullptr) return provider->Locker();
  }
  return nullptr;
}

std::vector<Share> SharesOf(const ExtentList& list, uint64_t begin,
                            uint64_t bytes) {
  std::vector<Share> shares;
  uint64_t at = 0;
  list.ForEach(begin, bytes, [&](Origin origin, uint64_t from, uint64_t size) {
    auto share = std::find_if(
        shares.begin(), shares.end(),
        [&](const Share& s) { return s.provider == origin.provider; });
    if (share == shares.end()) {
      share = shares.insert(shares.end(), {origin.provider, {}});
    }
    share->stretches.push_back({origin.index, from, size, at});
    at += size;
  });
  return shares;
}

Status AwaitShares(const std::vector<Share>& shares, const Job& job) {
  for (const Share& share : shares) {
    TC_RETURN_IF_ERROR(share.provider->Await(share.stretches, job));
  }
  return {};
}

Status BeginShares(const std::vector<Share>& shares, MutableByteSpan scratch,
                   FillBuffer* buffer) {
  for (const Share& share : shares) {
    TC_RETURN_IF_ERROR(share.provider->Fill(share.stretches, scratch, buffer));
  }
  return {};
}

Status FillShares(const std::vector<Share>& shares, MutableByteSpan scratch,
                  FillBuffer* buffer) {
  // Waits after an exception as well: the memory must not go back while a
  // device writes into it.
  struct Finisher {
    const std::vector<Share>& shares;
    int worker;
    Status All() {
      Status first;
      for (const Share& share : shares) {
        Status status = share.provider->Finish(worker);
        if (first.ok()) first = std::move(status);
      }
      return first;
    }
    ~Finisher() { (void)All(); }
  } finisher{shares, buffer->worker()};
  TC_RETURN_IF_ERROR(BeginShares(shares, scratch, buffer));
  return finisher.All();
}

}  // namespace torch_ckpt
