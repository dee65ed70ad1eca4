// The CUDA driver, found at run time: nothing of CUDA is linked or included.
//
// One binary then serves machines with and without a GPU. The driver's library
// has the same name for every CUDA version, and its contexts, streams and
// memory are those that torch's CUDA runtime uses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace torch_ckpt {

// The types of <cuda.h> that cross: enums are ints, handles are pointers to
// nothing we look into, and a CUdeviceptr is an integer as wide as a pointer.
using CuResult = int;
using CuDevice = int;
using CuContext = struct CUctx_st*;
using CuStream = struct CUstream_st*;
using CuDevicePtr = uintptr_t;

struct CuMemLocation {
  int type;  // CUmemLocationType
  int id;
};

// CUmemcpyAttributes, of copies in a batch.
struct CuCopyAttributes {
  int source_order;    // CUmemcpySrcAccessOrder
  CuMemLocation from;  // hints, for memory that may be
  CuMemLocation to;    // in more than one place
  unsigned int flags;  // CUmemcpyFlags
};
static_assert(sizeof(CuCopyAttributes) == 24);

// CUDA_MEMCPY2D: `height` rows of `width` bytes.
struct CuCopy2D {
  size_t from_x = 0, from_y = 0;
  int from_kind = 2;  // CU_MEMORYTYPE_DEVICE
  const void* from_host = nullptr;
  CuDevicePtr from = 0;
  void* from_array = nullptr;
  size_t from_pitch = 0;  // bytes from row to row
  size_t to_x = 0, to_y = 0;
  int to_kind = 1;  // CU_MEMORYTYPE_HOST
  void* to = nullptr;
  CuDevicePtr to_device = 0;
  void* to_array = nullptr;
  size_t to_pitch = 0;
  size_t width = 0, height = 0;
};
static_assert(sizeof(CuCopy2D) == 128);

// The entry points in use, with their signatures in <cuda.h>. The suffixes are
// the ABI versions that its macros choose since CUDA 4.0 (_v2).
struct CudaFunctions {
  CuResult (*cuInit)(unsigned int flags);
  CuResult (*cuGetErrorString)(CuResult error, const char** text);
  CuResult (*cuDeviceGet)(CuDevice* device, int ordinal);
  CuResult (*cuDevicePrimaryCtxRetain)(CuContext* context, CuDevice device);
  CuResult (*cuCtxPushCurrent_v2)(CuContext context);
  CuResult (*cuCtxPopCurrent_v2)(CuContext* context);
  CuResult (*cuCtxSynchronize)();
  CuResult (*cuStreamCreate)(CuStream* stream, unsigned int flags);
  CuResult (*cuStreamSynchronize)(CuStream stream);
  CuResult (*cuStreamDestroy_v2)(CuStream stream);
  CuResult (*cuMemGetAddressRange_v2)(CuDevicePtr* base, size_t* bytes,
                                      CuDevicePtr inside);
  CuResult (*cuMemcpyDtoHAsync_v2)(void* to, CuDevicePtr from, size_t bytes,
                                   CuStream stream);
  CuResult (*cuMemcpy2DAsync_v2)(const CuCopy2D* copy, CuStream stream);
  // Null in drivers before CUDA 12.8. A symbol of the driver never changes its
  // signature: CUDA 13, which has no `failed` any more, calls its own _v2, and
  // its driver has this one too.
  CuResult (*cuMemcpyBatchAsync)(CuDevicePtr* to, CuDevicePtr* from,
                                 size_t* bytes, size_t count,
                                 CuCopyAttributes* attributes,
                                 size_t* attributes_from,
                                 size_t attributes_count, size_t* failed,
                                 CuStream stream);
  CuResult (*cuMemHostRegister_v2)(void* data, size_t bytes,
                                   unsigned int flags);
  CuResult (*cuMemHostUnregister)(void* data);
};

// Thread-safe; lives as long as the process, as does the driver's library.
class CudaDriver {
 public:
  // Loads TORCH_CKPT_LIBCUDA or, where that is not set, libcuda.so.1, at the
  // first call. kUnsupported, every time, where there is none or no GPU.
  static Result<const CudaDriver*> Process();

  // Loads and initialises the library at `path`.
  static Result<std::unique_ptr<const CudaDriver>> Load(
      const std::string& path);

  const CudaFunctions& functions() const { return functions_; }

  // ok for 0; else an error with the driver's words: kExhausted when the device
  // is out of memory, kIo with EIO otherwise.
  Status Check(CuResult result, const char* call, int ordinal) const;

 private:
  explicit CudaDriver(const CudaFunctions& functions) : functions_(functions) {}
  const CudaFunctions functions_;
};

}  // namespace torch_ckpt
