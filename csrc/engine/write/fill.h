// Filling a part of an output: each provider makes its stretches of it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/write/extents.h"
#include "engine/write/fill_buffer.h"
#include "engine/write/provider.h"

namespace torch_ckpt {

// The providers of a job's outputs, and what they want. Thread-safe.
class Providers {
 public:
  // The lists must outlive this.
  explicit Providers(const std::vector<const ExtentList*>& lists);

  const std::vector<Provider*>& all() const { return all_; }
  // What the one of them that wants most wants: a worker asks one at a time.
  uint64_t scratch_bytes() const { return scratch_bytes_; }
  PageLocker* locker() const;  // see Provider

 private:
  std::vector<Provider*> all_;
  uint64_t scratch_bytes_ = 0;
};

// What one provider makes of a part of an output.
struct ProviderStretches {
  Provider* provider = nullptr;
  std::vector<Stretch> stretches;
};

// Those of [begin, begin + bytes).
std::vector<ProviderStretches> StretchesByProvider(const ExtentList& list,
                                                   uint64_t begin,
                                                   uint64_t bytes);

// Waits until filling them would not have to wait for anybody.
Status AwaitStretches(const std::vector<ProviderStretches>& asked,
                      const Job& job);

// Fills `buffer` with them. What they have begun goes on until their providers'
// Finish has returned. `scratch` is as large as Providers says.
Status BeginStretches(const std::vector<ProviderStretches>& asked,
                      MutableByteSpan scratch, FillBuffer* buffer);

// Fills `buffer`. However it ends, nobody writes there any more.
Status FillStretches(const std::vector<ProviderStretches>& asked,
                     MutableByteSpan scratch, FillBuffer* buffer);

}  // namespace torch_ckpt
