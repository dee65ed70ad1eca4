// Copies from CUDA devices into host memory, by the driver's table.
#pragma once

#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "runtime/arena.h"
#include "runtime/cuda_driver.h"

namespace torch_ckpt {

// A device and its primary context, the one that torch uses. Thread-safe. No
// call leaves a context current on its thread that was not before.
class CudaDevice final : public PageLocker {
 public:
  // The process's one object for the device, never destroyed: it page-locks
  // memory of the process's arena. Ordinals count as torch's do.
  static Result<CudaDevice*> Process(int ordinal);

  // The driver must outlive the device.
  static Result<std::unique_ptr<CudaDevice>> Open(const CudaDriver* driver,
                                                  int ordinal);

  int ordinal() const { return ordinal_; }

  // Lock: for all devices of the process.
  Status Lock(std::byte* data, size_t size) override;
  void Unlock(std::byte* data) override;

  // A stream that does not wait for the legacy default stream, so that copies
  // run beside the trainer's kernels.
  Result<CuStream> CreateStream();
  void DestroyStream(CuStream stream);
  // Begins the copy; `to` must stay until Wait(stream) has returned. Copies
  // that cross a kArenaPage border are split there.
  Status Copy(const std::byte* from, MutableByteSpan to, CuStream stream);
  Status Wait(CuStream stream);

 private:
  CudaDevice(const CudaDriver* driver, int ordinal, CuContext context)
      : driver_(driver), ordinal_(ordinal), context_(context) {}

  // Runs `work` with the context current and says which call failed.
  template <class Work>
  Status InContext(const char* call, Work work) const;

  const CudaDriver* const driver_;
  const int ordinal_;
  const CuContext context_;  // retained, never released: torch keeps it too
};

// The copies of one job: a stream for every worker and device. Different
// workers may call at once; a worker's own calls come one after another.
class CudaCopies {
 public:
  explicit CudaCopies(int workers);
  ~CudaCopies();  // REQUIRES: every worker that has copied has waited
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  // Begins a copy. `to` must stay, whatever is returned, until Wait(worker).
  Status Begin(int worker, CudaDevice* device, const std::byte* from,
               MutableByteSpan to);
  // Returns when no copy of this worker runs any more; its first error.
  Status Wait(int worker);

 private:
  struct Stream {
    CudaDevice* device;
    CuStream handle;
    bool busy;
  };
  std::vector<std::vector<Stream>> streams_;  // by worker
};

}  // namespace torch_ckpt
