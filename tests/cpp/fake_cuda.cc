// A CUDA driver for tests, in host memory: the entry points of
// runtime/cuda_driver.h with the rules that real ones have. It refuses calls
// without a current context, locks of memory that is locked, and copies across
// the border of locked memory or of an allocation; a copy is done no earlier
// than its stream is synchronised. An address on the "device" is a host address
// with kDeviceBit. Made with FAKE_CUDA_BEFORE_12_8 it is a driver without
// batches.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr uintptr_t kDeviceBit = uintptr_t{1} << 62;
// Of the enum CUresult.
constexpr int kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201,
              kNotFound = 500, kAlreadyRegistered = 712, kNotRegistered = 713;

struct Copy {
  void* to;
  uintptr_t from;
  size_t bytes;
};

struct Failure {
  int call;  // counted from 1
  int result;
};

std::mutex mutex;
std::map<std::string, int> calls;
std::map<std::string, Failure> failures;
using Ranges = std::map<uintptr_t, size_t>;
Ranges locked;
Ranges allocations;  // on the devices
std::map<int*, std::vector<Copy>> streams;
size_t abandoned = 0;  // copies whose streams went before they were waited for
int contexts[kDevices];
thread_local std::vector<int*> current;

// Counts the call; what it must fail with, or 0. REQUIRES: mutex is held.
int Enter(const char* name) {
  const int call = ++calls[name];
  const auto failure = failures.find(name);
  if (failure == failures.end() || failure->second.call > call) return 0;
  return failure->second.result;
}

#ifndef FAKE_CUDA_BEFORE_12_8
struct Attributes {  // CUmemcpyAttributes, by the words of <cuda.h>
  int srcAccessOrder;
  struct {
    int type, id;
  } srcLocHint, dstLocHint;
  unsigned int flags;
};
#endif

bool SpansBorder(const Ranges& ranges, uintptr_t begin, uintptr_t end) {
  for (const auto& [at, size] : ranges) {
    const bool overlaps = at < end && begin < at + size;
    if (overlaps && (begin < at || end > at + size)) return true;
  }
  return false;
}

// Puts the copy, begun in whichever way, into the stream.
// REQUIRES: mutex is held.
int Begin(const Copy& copy, int* stream) {
  if (const int failed = Enter("copy")) return failed;
  const auto it = streams.find(stream);
  const auto at = reinterpret_cast<uintptr_t>(copy.to);
  if (it == streams.end() || (copy.from & kDeviceBit) == 0 || copy.bytes == 0 ||
      SpansBorder(locked, at, at + copy.bytes) ||
      SpansBorder(allocations, copy.from, copy.from + copy.bytes)) {
    return kInvalidValue;
  }
  it->second.push_back({copy.to, copy.from & ~kDeviceBit, copy.bytes});
  return 0;
}

}  // namespace

#define FAKE_ENTER(name)                   \
  std::lock_guard<std::mutex> lock(mutex); \
  if (const int failed = Enter(name)) return failed
#define FAKE_ENTER_IN_CONTEXT(name) \
  FAKE_ENTER(name);                 \
  if (current.empty()) return kInvalidContext

extern "C" {

// --- the tests' side ---------------------------------------------------------

void fake_cuda_reset() {
  std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
  failures.clear();
  allocations.clear();
  abandoned = 0;
}

// Makes memory on the device one allocation.
void fake_cuda_allocate(uintptr_t begin, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  allocations[begin] = size;
}

int fake_cuda_calls(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  return calls[name];
}

// From its `call`-th call on, `name` returns `result`.
void fake_cuda_fail(const char* name, int call, int result) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[name] = {call, result};
}

int fake_cuda_live_streams() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(streams.size());
}

int fake_cuda_locked_ranges() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(locked.size());
}

int fake_cuda_pending_copies() {
  std::lock_guard<std::mutex> lock(mutex);
  size_t pending = abandoned;
  for (const auto& [stream, copies] : streams) pending += copies.size();
  return static_cast<int>(pending);
}

// --- the driver's side -------------------------------------------------------

int cuInit(unsigned int) {
  FAKE_ENTER("cuInit");
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  if (error >= 10000) return kInvalidValue;
  *text = error == 700 ? "an illegal memory access was encountered"
                       : "an error of the fake driver";
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  FAKE_ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(int** context, int device) {
  FAKE_ENTER("cuDevicePrimaryCtxRetain");
  *context = &contexts[device];
  return 0;
}

int cuCtxPushCurrent_v2(int* context) {
  FAKE_ENTER("cuCtxPushCurrent_v2");
  current.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(int** context) {
  FAKE_ENTER_IN_CONTEXT("cuCtxPopCurrent_v2");
  *context = current.back();
  current.pop_back();
  return 0;
}

int cuCtxSynchronize() {
  FAKE_ENTER_IN_CONTEXT("cuCtxSynchronize");
  return 0;
}

int cuStreamCreate(int** stream, unsigned int flags) {
  FAKE_ENTER_IN_CONTEXT("cuStreamCreate");
  if (flags > 1) return kInvalidValue;
  *stream = new int(0);
  streams[*stream];
  return 0;
}

// An error here is that of a lost context, in which nothing runs any more.
int cuStreamSynchronize(int* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const int failed = Enter("cuStreamSynchronize");
  if (current.empty()) return kInvalidContext;
  const auto it = streams.find(stream);
  if (it == streams.end()) return kInvalidValue;
  const std::vector<Copy> copies = std::move(it->second);
  it->second.clear();
  if (failed != 0) return failed;
  for (const Copy& copy : copies) {
    std::memcpy(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes);
  }
  return 0;
}

int cuStreamDestroy_v2(int* stream) {
  FAKE_ENTER_IN_CONTEXT("cuStreamDestroy_v2");
  const auto it = streams.find(stream);
  if (it == streams.end()) return kInvalidValue;
  abandoned += it->second.size();  // a real device goes on with them
  streams.erase(it);
  delete stream;
  return 0;
}

int cuMemGetAddressRange_v2(uintptr_t* base, size_t* size, uintptr_t inside) {
  FAKE_ENTER_IN_CONTEXT("cuMemGetAddressRange_v2");
  for (const auto& [begin, bytes] : allocations) {
    if (inside >= begin && inside - begin < bytes) {
      *base = begin;
      *size = bytes;
      return 0;
    }
  }
  return kNotFound;
}

int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, int* stream) {
  FAKE_ENTER_IN_CONTEXT("cuMemcpyDtoHAsync_v2");
  return Begin({to, from, bytes}, stream);
}

// CUDA_MEMCPY2D, by the words of <cuda.h>.
struct Copy2D {
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void* srcHost;
  uintptr_t srcDevice;
  void* srcArray;
  size_t srcPitch, dstXInBytes, dstY;
  int dstMemoryType;
  void* dstHost;
  uintptr_t dstDevice;
  void* dstArray;
  size_t dstPitch, WidthInBytes, Height;
};

// All of its rows, or none.
int cuMemcpy2DAsync_v2(const Copy2D* c, int* stream) {
  FAKE_ENTER_IN_CONTEXT("cuMemcpy2DAsync_v2");
  const auto to = reinterpret_cast<uintptr_t>(c->dstHost);
  if (c->srcMemoryType != 2 || c->dstMemoryType != 1 || c->srcXInBytes != 0 ||
      c->srcY != 0 || c->dstXInBytes != 0 || c->dstY != 0 || c->Height == 0 ||
      c->srcPitch < c->WidthInBytes || c->dstPitch < c->WidthInBytes ||
      SpansBorder(locked, to,
                  to + (c->Height - 1) * c->dstPitch + c->WidthInBytes)) {
    return kInvalidValue;
  }
  if (const int failed = Enter("copy")) return failed;
  --calls["copy"];  // each row is entered as one; together they are one
  for (size_t row = 0; row < c->Height; ++row) {
    const int result =
        Begin({static_cast<char*>(c->dstHost) + row * c->dstPitch,
               c->srcDevice + row * c->srcPitch, c->WidthInBytes},
              stream);
    if (row > 0) --calls["copy"];
    if (result != 0) return result;
  }
  return 0;
}

#ifndef FAKE_CUDA_BEFORE_12_8
// What comes before a copy that is refused has begun, and what follows not.
int cuMemcpyBatchAsync(uintptr_t* to, uintptr_t* from, size_t* bytes,
                       size_t count, Attributes* attributes,
                       size_t* attributes_from, size_t attributes_count,
                       size_t* failed, int* stream) {
  FAKE_ENTER_IN_CONTEXT("cuMemcpyBatchAsync");
  *failed = SIZE_MAX;
  if (count == 0 || attributes_count != 1 || attributes_from[0] != 0 ||
      attributes->srcAccessOrder != 1 || attributes->srcLocHint.type != 1 ||
      attributes->srcLocHint.id >= kDevices ||
      attributes->dstLocHint.type != 2 || attributes->flags > 1) {
    return kInvalidValue;
  }
  for (size_t i = 0; i < count; ++i) {
    const int result =
        Begin({reinterpret_cast<void*>(to[i]), from[i], bytes[i]}, stream);
    if (result != 0) {
      *failed = i;
      return result;
    }
  }
  return 0;
}
#endif

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned int flags) {
  FAKE_ENTER_IN_CONTEXT("cuMemHostRegister_v2");
  if (flags != 1) return kInvalidValue;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (const auto& [at, size] : locked) {
    if (at < begin + bytes && begin < at + size) return kAlreadyRegistered;
  }
  locked[begin] = bytes;
  return 0;
}

int cuMemHostUnregister(void* data) {
  FAKE_ENTER_IN_CONTEXT("cuMemHostUnregister");
  return locked.erase(reinterpret_cast<uintptr_t>(data)) ? 0 : kNotRegistered;
}

}  // extern "C"
