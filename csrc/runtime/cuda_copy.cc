#include "runtime/cuda_copy.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace torch_ckpt {
namespace {

// Of <cuda.h>.
constexpr unsigned int kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned int kRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE

}  // namespace

Result<CudaDevice*> CudaDevice::Process(int ordinal) {
  static std::mutex mutex;
  static auto* const devices =
      new std::map<int, std::unique_ptr<CudaDevice>>;  // never destroyed
  TC_ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::Process());
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<CudaDevice>& device = (*devices)[ordinal];
  if (!device) {
    TC_ASSIGN_OR_RETURN(device, Open(driver, ordinal));
  }
  return device.get();
}

Result<std::unique_ptr<CudaDevice>> CudaDevice::Open(const CudaDriver* driver,
                                                     int ordinal) {
  const CudaFunctions& f = driver->functions();
  CuDevice device = 0;
  TC_RETURN_IF_ERROR(
      driver->Check(f.cuDeviceGet(&device, ordinal), "cuDeviceGet", ordinal));
  CuContext context = nullptr;
  TC_RETURN_IF_ERROR(driver->Check(f.cuDevicePrimaryCtxRetain(&context, device),
                                   "cuDevicePrimaryCtxRetain", ordinal));
  return std::unique_ptr<CudaDevice>(new CudaDevice(driver, ordinal, context));
}

template <class Work>
Status CudaDevice::InContext(const char* call, Work work) const {
  const CudaFunctions& f = driver_->functions();
  TC_RETURN_IF_ERROR(driver_->Check(f.cuCtxPushCurrent_v2(context_),
                                    "cuCtxPushCurrent", ordinal_));
  const CuResult result = work(f);
  CuContext popped = nullptr;
  const CuResult pop = f.cuCtxPopCurrent_v2(&popped);
  TC_RETURN_IF_ERROR(driver_->Check(result, call, ordinal_));
  return driver_->Check(pop, "cuCtxPopCurrent", ordinal_);
}

Status CudaDevice::Lock(std::byte* data, size_t size) {
  return InContext("cuMemHostRegister", [&](const CudaFunctions& f) {
    return f.cuMemHostRegister_v2(data, size, kRegisterPortable);
  });
}

void CudaDevice::Unlock(std::byte* data) {
  // Fails only where the context is lost, and its locks with it.
  (void)InContext("cuMemHostUnregister", [&](const CudaFunctions& f) {
    return f.cuMemHostUnregister(data);
  });
}

Result<CuStream> CudaDevice::CreateStream() {
  CuStream stream = nullptr;
  TC_RETURN_IF_ERROR(InContext("cuStreamCreate", [&](const CudaFunctions& f) {
    return f.cuStreamCreate(&stream, kStreamNonBlocking);
  }));
  return stream;
}

void CudaDevice::DestroyStream(CuStream stream) {
  // Fails only where the context is lost, and its streams with it.
  (void)InContext("cuStreamDestroy", [&](const CudaFunctions& f) {
    return f.cuStreamDestroy_v2(stream);
  });
}

Status CudaDevice::Copy(const std::byte* from, MutableByteSpan to,
                        CuStream stream) {
  return InContext("cuMemcpyDtoHAsync", [&](const CudaFunctions& f) {
    auto source = reinterpret_cast<CuDevicePtr>(from);
    for (MutableByteSpan rest = to; !rest.empty();) {
      const auto at = reinterpret_cast<uintptr_t>(rest.data());
      const size_t size =
          std::min<size_t>(rest.size(), kArenaPage - at % kArenaPage);
      const CuResult result =
          f.cuMemcpyDtoHAsync_v2(rest.data(), source, size, stream);
      if (result != 0) return result;
      source += size;
      rest = rest.subspan(size);
    }
    return CuResult{0};
  });
}

Status CudaDevice::Wait(CuStream stream) {
  return InContext("cuStreamSynchronize", [&](const CudaFunctions& f) {
    return f.cuStreamSynchronize(stream);
  });
}

CudaCopies::CudaCopies(int workers)
    : streams_(static_cast<size_t>(std::max(1, workers))) {}

CudaCopies::~CudaCopies() {
  for (const std::vector<Stream>& streams : streams_) {
    for (const Stream& s : streams) s.device->DestroyStream(s.handle);
  }
}

Status CudaCopies::Begin(int worker, CudaDevice* device, const std::byte* from,
                         MutableByteSpan to) {
  std::vector<Stream>& streams = streams_[static_cast<size_t>(worker)];
  auto stream =
      std::find_if(streams.begin(), streams.end(),
                   [&](const Stream& s) { return s.device == device; });
  if (stream == streams.end()) {
    streams.reserve(streams.size() + 1);  // nothing may fail once it is there
    TC_ASSIGN_OR_RETURN(const CuStream handle, device->CreateStream());
    stream = streams.insert(streams.end(), {device, handle, false});
  }
  stream->busy = true;
  return device->Copy(from, to, stream->handle);
}

Status CudaCopies::Wait(int worker) {
  Status first;
  for (Stream& s : streams_[static_cast<size_t>(worker)]) {
    if (!s.busy) continue;
    s.busy = false;
    Status status = s.device->Wait(s.handle);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

}  // namespace torch_ckpt
