// Tensors of this process's memory as things of providers, one for host memory,
// one for devices, one for those that are cast on the way.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/write/casts.h"
#include "engine/write/provider.h"
#include "engine/write/source_tensor.h"
#include "runtime/cuda_copy.h"

namespace torch_ckpt {

// Elements that are written as elements of another type.
struct ElementCast {
  Dtype from;
  Dtype to;
  std::string fqn;  // for errors
};

class HostMemory final : public Provider {
 public:
  // Things are sources by their position, which must be in host memory.
  explicit HostMemory(const std::vector<SourceTensor>& sources);

  const std::byte* Find(const Stretch& stretch) const override;
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  const std::vector<SourceTensor>& sources_;
  std::vector<bool> dense_;
};

// Copies beside the worker that fills; Finish waits for it. What has strides is
// copied in rows; where these stand in another order than is wanted, the worker
// waits for them and turns them in host memory. Nothing is made on the device.
class DeviceMemory final : public Provider {
 public:
  // Of the sources that lie on devices. A device's refusal names its tensor if
  // there are `names`. kUnsupported where CUDA's driver is not usable.
  static Result<std::unique_ptr<DeviceMemory>> Make(
      const std::vector<SourceTensor>& sources,
      const std::vector<std::string>* names, int workers);

  uint64_t ScratchBytes() const override;
  PageLocker* Locker() const override;
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;
  Status Finish(int worker) override { return copies_.Wait(worker); }

 private:
  DeviceMemory(const std::vector<SourceTensor>& sources,
               const std::vector<std::string>* names, int workers)
      : sources_(sources), names_(names), copies_(workers) {}

  // Begins the copies that were added, all of them of the sources of
  // `stretches`, and says of which one it was refused.
  Status Begin(const std::vector<Stretch>& stretches, int worker);

  const std::vector<SourceTensor>& sources_;
  const std::vector<std::string>* const names_;
  std::map<int, CudaDevice*> devices_;
  bool has_strides_ = false;
  CudaCopies copies_;
};

// Waits for all that is queued on the devices of `sources`: for callers who do
// not know which kernels fill them.
Status WaitForDevices(const std::vector<SourceTensor>& sources);

// All sources of a job. They must outlive it, and stay where they are.
class MemorySources {
 public:
  // `workers` count all that fill at once, see FillBuffer. Errors as
  // DeviceMemory.
  static Result<MemorySources> Make(const std::vector<SourceTensor>& sources,
                                    const std::vector<std::string>* names,
                                    int workers);

  // A source, as it is or cast. Before anybody fills.
  Origin Of(size_t source, const std::optional<ElementCast>& cast = {});

  // See Casts::Check.
  Status CheckCasts() const { return casts_->Check(); }

 private:
  explicit MemorySources(const std::vector<SourceTensor>& sources)
      : sources_(&sources),
        host_(std::make_unique<HostMemory>(sources)),
        casts_(std::make_unique<Casts>()) {}

  const std::vector<SourceTensor>* sources_;
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<Casts> casts_;
};

}  // namespace torch_ckpt
