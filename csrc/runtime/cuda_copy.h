// Copies from CUDA devices into host memory, by the driver's table.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "runtime/arena.h"
#include "runtime/cuda_driver.h"

namespace torch_ckpt {

// Rows of as many bytes each, one every `pitch` bytes, which do not overlap.
struct DeviceRows {
  const std::byte* from = nullptr;
  uint64_t bytes = 0;  // of each
  uint64_t pitch = 0;
  uint64_t count = 0;
};

// Copies from one device, in the arrays that its driver takes.
struct CopyList {
  std::vector<CuDevicePtr> to, from;
  std::vector<size_t> sizes;
  std::vector<CuCopy2D> rows;
  bool empty() const { return sizes.empty() && rows.empty(); }
  // The device's allocation that was last asked for.
  CuDevicePtr allocation = 0;
  size_t allocation_bytes = 0;

  void Clear();
};

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

  // Returns when all that the process has queued on the device is done.
  Status WaitForAll() const;

  // A stream that does not wait for the legacy default stream, so that copies
  // run beside the trainer's kernels.
  Result<CuStream> CreateStream();
  void DestroyStream(CuStream stream);
  // Adds a copy, cut where it crosses a kArenaPage border of host memory. What
  // goes on where the last copy ended, within an allocation of the device and
  // in host memory, makes that one longer: views of one buffer that stay
  // neighbours are few copies.
  void Add(CopyList* copies, const std::byte* from, MutableByteSpan to) const;
  // Adds copies of rows to `to`, which is as large as all, one after another.
  void AddRows(CopyList* copies, DeviceRows rows, MutableByteSpan to) const;
  // Begins the copies, in no order. Host memory must stay, whatever is
  // returned, until Wait(stream) has returned. After an error, `*failed` is
  // where on the device the copy begins that was refused.
  // REQUIRES: the stream is one of CreateStream().
  Status Copy(CopyList* copies, CuStream stream, const std::byte** failed);
  Status Wait(CuStream stream);

 private:
  CudaDevice(const CudaDriver* driver, int ordinal, CuContext context)
      : driver_(driver),
        ordinal_(ordinal),
        context_(context),
        batches_(driver->functions().cuMemcpyBatchAsync != nullptr) {}

  // Whether a copy can be the rest of the last one.
  bool GoesOn(CopyList* copies, CuDevicePtr from, CuDevicePtr to,
              size_t size) const;
  // Whether the copies [begin, begin + count) have begun, in one call.
  bool CopyBatch(CopyList* copies, size_t begin, size_t count, CuStream stream);

  // Runs `work` with the context current and says which call failed.
  template <class Work>
  Status InContext(const char* call, Work work) const;

  const CudaDriver* const driver_;
  const int ordinal_;
  const CuContext context_;    // retained, never released: torch keeps it too
  std::atomic<bool> batches_;  // until the driver says that it has none
};

// The copies of one job: a stream for every worker and device. Different
// workers may call at once; a worker's own calls come one after another.
class CudaCopies {
 public:
  explicit CudaCopies(int workers);
  ~CudaCopies();  // REQUIRES: every worker that has copied has waited
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  // Adds a copy to those that Begin(worker) begins.
  void Add(int worker, CudaDevice* device, const std::byte* from,
           MutableByteSpan to);
  // CudaDevice::AddRows.
  void AddRows(int worker, CudaDevice* device, const DeviceRows& rows,
               MutableByteSpan to);
  // Begins what was added. Host memory must stay, whatever is returned, until
  // Wait(worker). After an error, `*failed` is where on its device the copy
  // begins that was refused, or null; some copies may have begun.
  Status Begin(int worker, const std::byte** failed);
  // Returns when no copy of this worker runs any more; its first error. Forgets
  // what was added and has not begun.
  Status Wait(int worker);

 private:
  struct Stream {
    CudaDevice* device;
    CuStream handle;  // null before its first copy
    bool busy;
    CopyList added;
  };
  CopyList* AddedOf(int worker, CudaDevice* device);

  std::vector<std::vector<Stream>> streams_;  // by worker
};

}  // namespace torch_ckpt
