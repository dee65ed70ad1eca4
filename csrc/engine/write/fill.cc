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

std::vector<ProviderStretches> StretchesByProvider(const ExtentList& list,
                                                   uint64_t begin,
                                                   uint64_t bytes) {
  std::vector<ProviderStretches> asked;
  uint64_t at = 0;
  list.ForEach(begin, bytes, [&](Origin origin, uint64_t from, uint64_t size) {
    auto of_provider = std::find_if(asked.begin(), asked.end(),
                                    [&](const ProviderStretches& p) {
                                      return p.provider == origin.provider;
                                    });
    if (of_provider == asked.end()) {
      of_provider = asked.insert(asked.end(), {origin.provider, {}});
    }
    of_provider->stretches.push_back({origin.index, from, size, at});
    at += size;
  });
  return asked;
}

Status AwaitStretches(const std::vector<ProviderStretches>& asked,
                      const Job& job) {
  for (const ProviderStretches& of_provider : asked) {
    TC_RETURN_IF_ERROR(of_provider.provider->Await(of_provider.stretches, job));
  }
  return {};
}

Status BeginStretches(const std::vector<ProviderStretches>& asked,
                      MutableByteSpan scratch, FillBuffer* buffer) {
  for (const ProviderStretches& of_provider : asked) {
    uint64_t bytes = 0;
    for (const Stretch& stretch : of_provider.stretches) bytes += stretch.bytes;
    const uint64_t before = buffer->filled();
    TC_RETURN_IF_ERROR(
        of_provider.provider->Fill(of_provider.stretches, scratch, buffer));
    const uint64_t made = buffer->filled() - before;
    if (made == bytes) continue;
    return Internal("made " + std::to_string(made) + " of " +
                    std::to_string(bytes) +
                    " bytes: this is a bug of torch_ckpt");
  }
  return {};
}

Status FillStretches(const std::vector<ProviderStretches>& asked,
                     MutableByteSpan scratch, FillBuffer* buffer) {
  // Waits after an exception as well: the memory must not go back while a
  // device writes into it.
  struct Finisher {
    const std::vector<ProviderStretches>& asked;
    int worker;
    Status All() {
      Status first;
      for (const ProviderStretches& of_provider : asked) {
        Status status = of_provider.provider->Finish(worker);
        if (first.ok()) first = std::move(status);
      }
      return first;
    }
    ~Finisher() { (void)All(); }
  } finisher{asked, buffer->worker()};
  TC_RETURN_IF_ERROR(BeginStretches(asked, scratch, buffer));
  return finisher.All();
}

}  // namespace torch_ckpt
