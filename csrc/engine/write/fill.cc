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

std::vector<Portion> PortionsOf(const ExtentList& list, uint64_t begin,
                                uint64_t bytes) {
  std::vector<Portion> portions;
  uint64_t at = 0;
  list.ForEach(begin, bytes, [&](Origin origin, uint64_t from, uint64_t size) {
    auto portion = std::find_if(
        portions.begin(), portions.end(),
        [&](const Portion& p) { return p.provider == origin.provider; });
    if (portion == portions.end()) {
      portion = portions.insert(portions.end(), {origin.provider, {}});
    }
    portion->stretches.push_back({origin.index, from, size, at});
    at += size;
  });
  return portions;
}

Status AwaitPortions(const std::vector<Portion>& portions, const Job& job) {
  for (const Portion& portion : portions) {
    TC_RETURN_IF_ERROR(portion.provider->Await(portion.stretches, job));
  }
  return {};
}

Status BeginPortions(const std::vector<Portion>& portions,
                     MutableByteSpan scratch, FillBuffer* buffer) {
  for (const Portion& portion : portions) {
    uint64_t asked = 0;
    for (const Stretch& stretch : portion.stretches) asked += stretch.bytes;
    const uint64_t before = buffer->filled();
    TC_RETURN_IF_ERROR(
        portion.provider->Fill(portion.stretches, scratch, buffer));
    const uint64_t made = buffer->filled() - before;
    if (made == asked) continue;
    return Internal("made " + std::to_string(made) + " of " +
                    std::to_string(asked) +
                    " bytes: this is a bug of torch_ckpt");
  }
  return {};
}

Status FillPortions(const std::vector<Portion>& portions,
                    MutableByteSpan scratch, FillBuffer* buffer) {
  // Waits after an exception as well: the memory must not go back while a
  // device writes into it.
  struct Finisher {
    const std::vector<Portion>& portions;
    int worker;
    Status All() {
      Status first;
      for (const Portion& portion : portions) {
        Status status = portion.provider->Finish(worker);
        if (first.ok()) first = std::move(status);
      }
      return first;
    }
    ~Finisher() { (void)All(); }
  } finisher{portions, buffer->worker()};
  TC_RETURN_IF_ERROR(BeginPortions(portions, scratch, buffer));
  return finisher.All();
}

}  // namespace torch_ckpt
