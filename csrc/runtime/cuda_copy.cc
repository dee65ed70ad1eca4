#include "runtime/cuda_copy.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace torch_ckpt {
namespace {

// Of <cuda.h>.
constexpr unsigned int kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned int kRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
constexpr CuResult kNotFound = 500;             // CUDA_ERROR_NOT_FOUND
constexpr CuResult kNotSupported = 801;         // CUDA_ERROR_NOT_SUPPORTED
constexpr int kOnDevice = 1;                    // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kOnHost = 2;                      // CU_MEM_LOCATION_TYPE_HOST
constexpr int kStreamOrder = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned int kBesideKernels =
    1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

// Of rows in one call: less than CU_DEVICE_ATTRIBUTE_MAX_PITCH of any device.
constexpr uint64_t kMostPitch = uint64_t{1} << 30;

// Enough that a call costs nothing per copy; drivers have crashed over tens of
// thousands at once, and the first copies run while the next are handed over.
constexpr size_t kBatchCopies = 1024;

}  // namespace

void CopyList::Clear() {
  to.clear();
  from.clear();
  sizes.clear();
  rows.clear();
}

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

Status CudaDevice::WaitForAll() const {
  return InContext("cuCtxSynchronize",
                   [](const CudaFunctions& f) { return f.cuCtxSynchronize(); });
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

bool CudaDevice::GoesOn(CopyList* copies, CuDevicePtr from, CuDevicePtr to,
                        size_t size) const {
  if (to % kArenaPage == 0 || copies->sizes.empty()) return false;
  const size_t last = copies->sizes.back();
  if (copies->to.back() + last != to || copies->from.back() + last != from) {
    return false;
  }
  // Two allocations may be neighbours, but no copy may reach into both.
  if (from - 1 - copies->allocation >= copies->allocation_bytes) {
    const Status asked =
        InContext("cuMemGetAddressRange", [&](const CudaFunctions& f) {
          return f.cuMemGetAddressRange_v2(&copies->allocation,
                                           &copies->allocation_bytes, from - 1);
        });
    if (!asked.ok()) {
      copies->allocation_bytes = 0;
      return false;
    }
  }
  return from - copies->allocation + size <= copies->allocation_bytes;
}

void CudaDevice::Add(CopyList* copies, const std::byte* from,
                     MutableByteSpan to) const {
  auto source = reinterpret_cast<CuDevicePtr>(from);
  while (!to.empty()) {
    const auto at = reinterpret_cast<CuDevicePtr>(to.data());
    const size_t size =
        std::min<size_t>(to.size(), kArenaPage - at % kArenaPage);
    if (GoesOn(copies, source, at, size)) {
      copies->sizes.back() += size;
    } else {
      copies->to.push_back(at);
      copies->from.push_back(source);
      copies->sizes.push_back(size);
    }
    source += size;
    to = to.subspan(size);
  }
}

void CudaDevice::AddRows(CopyList* copies, DeviceRows rows,
                         MutableByteSpan to) const {
  const auto add_one = [&] {
    Add(copies, rows.from, to.first(rows.bytes));
    rows.from += rows.pitch;
    --rows.count;
    to = to.subspan(rows.bytes);
  };
  if (rows.pitch > kMostPitch) {
    while (rows.count > 0) add_one();
    return;
  }
  // A row that crosses a border of locked memory is copied by itself.
  while (rows.count > 0) {
    const auto at = reinterpret_cast<CuDevicePtr>(to.data());
    const uint64_t room = kArenaPage - at % kArenaPage;
    const uint64_t count = std::min(rows.count, room / rows.bytes);
    if (count < 2) {
      add_one();
      continue;
    }
    CuCopy2D copy;
    copy.from = reinterpret_cast<CuDevicePtr>(rows.from);
    copy.from_pitch = rows.pitch;
    copy.to = to.data();
    copy.to_pitch = rows.bytes;
    copy.width = rows.bytes;
    copy.height = count;
    copies->rows.push_back(copy);
    rows.from += count * rows.pitch;
    rows.count -= count;
    to = to.subspan(count * rows.bytes);
  }
}

bool CudaDevice::CopyBatch(CopyList* copies, size_t begin, size_t count,
                           CuStream stream) {
  if (!batches_.load(std::memory_order_relaxed)) return false;
  CuCopyAttributes attributes{
      kStreamOrder, {kOnDevice, ordinal_}, {kOnHost, 0}, kBesideKernels};
  size_t first = 0;   // these attributes are those of copy 0 and all after it
  size_t failed = 0;  // of no use: below, the copy that is wrong fails itself
  CuResult result = 0;
  const Status status =
      InContext("cuMemcpyBatchAsync", [&](const CudaFunctions& f) {
        return result = f.cuMemcpyBatchAsync(
                   copies->to.data() + begin, copies->from.data() + begin,
                   copies->sizes.data() + begin, count, &attributes, &first, 1,
                   &failed, stream);
      });
  if (result == kNotSupported || result == kNotFound) batches_ = false;
  return status.ok();
}

Status CudaDevice::Copy(CopyList* copies, CuStream stream,
                        const std::byte** failed) {
  for (size_t begin = 0; begin < copies->sizes.size(); begin += kBatchCopies) {
    const size_t count = std::min(kBatchCopies, copies->sizes.size() - begin);
    if (CopyBatch(copies, begin, count, stream)) continue;
    // One by one. What was wrong with the batch is wrong with one of these, and
    // what of it has begun is copied twice, to no harm.
    for (size_t i = begin; i < begin + count; ++i) {
      *failed = reinterpret_cast<const std::byte*>(copies->from[i]);
      TC_RETURN_IF_ERROR(
          InContext("cuMemcpyDtoHAsync", [&](const CudaFunctions& f) {
            return f.cuMemcpyDtoHAsync_v2(
                reinterpret_cast<void*>(copies->to[i]), copies->from[i],
                copies->sizes[i], stream);
          }));
    }
  }
  for (const CuCopy2D& rows : copies->rows) {
    *failed = reinterpret_cast<const std::byte*>(rows.from);
    TC_RETURN_IF_ERROR(
        InContext("cuMemcpy2DAsync", [&](const CudaFunctions& f) {
          return f.cuMemcpy2DAsync_v2(&rows, stream);
        }));
  }
  *failed = nullptr;
  return {};
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
    for (const Stream& s : streams) {
      if (s.handle != nullptr) s.device->DestroyStream(s.handle);
    }
  }
}

CopyList* CudaCopies::AddedOf(int worker, CudaDevice* device) {
  std::vector<Stream>& streams = streams_[static_cast<size_t>(worker)];
  auto stream =
      std::find_if(streams.begin(), streams.end(),
                   [&](const Stream& s) { return s.device == device; });
  if (stream == streams.end()) {
    stream = streams.insert(streams.end(), {device, nullptr, false, {}});
  }
  return &stream->added;
}

void CudaCopies::Add(int worker, CudaDevice* device, const std::byte* from,
                     MutableByteSpan to) {
  device->Add(AddedOf(worker, device), from, to);
}

void CudaCopies::AddRows(int worker, CudaDevice* device, const DeviceRows& rows,
                         MutableByteSpan to) {
  device->AddRows(AddedOf(worker, device), rows, to);
}

Status CudaCopies::Begin(int worker, const std::byte** failed) {
  *failed = nullptr;
  for (Stream& s : streams_[static_cast<size_t>(worker)]) {
    if (s.added.empty()) continue;
    if (s.handle == nullptr) {
      TC_ASSIGN_OR_RETURN(s.handle, s.device->CreateStream());
    }
    s.busy = true;
    TC_RETURN_IF_ERROR(s.device->Copy(&s.added, s.handle, failed));
    s.added.Clear();
  }
  return {};
}

Status CudaCopies::Wait(int worker) {
  Status first;
  for (Stream& s : streams_[static_cast<size_t>(worker)]) {
    s.added.Clear();
    if (!s.busy) continue;
    s.busy = false;
    Status status = s.device->Wait(s.handle);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

}  // namespace torch_ckpt
