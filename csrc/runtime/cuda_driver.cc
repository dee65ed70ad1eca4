#include "runtime/cuda_driver.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>

namespace torch_ckpt {
namespace {

// Of the enum CUresult in <cuda.h>.
constexpr CuResult kSuccess = 0;
constexpr CuResult kOutOfMemory = 2;

std::string Words(const CudaFunctions& functions, CuResult result) {
  const char* text = nullptr;
  if (functions.cuGetErrorString(result, &text) != kSuccess || !text) {
    text = "unknown error";
  }
  return std::string(text) + " (CUDA error " + std::to_string(result) + ")";
}

Status NoDriver(const std::string& why) {
  return Unsupported(
      "CUDA tensors need NVIDIA's driver, which cannot be used here: " + why);
}

// Keeps the first symbol that is missing and must not be.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <class F>
  void FindOptional(const char* name, F** function) {
    *function = reinterpret_cast<F*>(dlsym(library_, name));
  }
  template <class F>
  void Find(const char* name, F** function) {
    FindOptional(name, function);
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

}  // namespace

Result<const CudaDriver*> CudaDriver::Process() {
  // Never destroyed: worker threads may outlive static objects.
  static const auto* const loaded =
      new const Result<std::unique_ptr<const CudaDriver>>([] {
        // Read once, before any thread of ours could change the environment.
        const char* path = std::getenv("TORCH_CKPT_LIBCUDA");
        return Load(path && *path ? path : "libcuda.so.1");
      }());
  if (!loaded->ok()) return loaded->status();
  return loaded->value().get();
}

Result<std::unique_ptr<const CudaDriver>> CudaDriver::Load(
    const std::string& path) {
  // Never closed: the driver keeps threads and exit handlers of its own.
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return NoDriver(why ? why : "it could not be loaded");
  }
  CudaFunctions f;
  Symbols symbols(library);
  symbols.Find("cuInit", &f.cuInit);
  symbols.Find("cuGetErrorString", &f.cuGetErrorString);
  symbols.Find("cuDeviceGet", &f.cuDeviceGet);
  symbols.Find("cuDevicePrimaryCtxRetain", &f.cuDevicePrimaryCtxRetain);
  symbols.Find("cuCtxPushCurrent_v2", &f.cuCtxPushCurrent_v2);
  symbols.Find("cuCtxPopCurrent_v2", &f.cuCtxPopCurrent_v2);
  symbols.Find("cuCtxSynchronize", &f.cuCtxSynchronize);
  symbols.Find("cuStreamCreate", &f.cuStreamCreate);
  symbols.Find("cuStreamSynchronize", &f.cuStreamSynchronize);
  symbols.Find("cuStreamDestroy_v2", &f.cuStreamDestroy_v2);
  symbols.Find("cuMemGetAddressRange_v2", &f.cuMemGetAddressRange_v2);
  symbols.Find("cuMemcpyDtoHAsync_v2", &f.cuMemcpyDtoHAsync_v2);
  symbols.Find("cuMemcpy2DAsync_v2", &f.cuMemcpy2DAsync_v2);
  symbols.FindOptional("cuMemcpyBatchAsync", &f.cuMemcpyBatchAsync);
  symbols.Find("cuMemHostRegister_v2", &f.cuMemHostRegister_v2);
  symbols.Find("cuMemHostUnregister", &f.cuMemHostUnregister);
  if (!symbols.missing().empty()) {
    return NoDriver(path + " has no " + symbols.missing());
  }
  const CuResult started = f.cuInit(0);
  if (started != kSuccess) return NoDriver("cuInit: " + Words(f, started));
  return std::unique_ptr<const CudaDriver>(new CudaDriver(f));
}

Status CudaDriver::Check(CuResult result, const char* call, int ordinal) const {
  if (result == kSuccess) return {};
  const std::string what = std::string(call) + " on device " +
                           std::to_string(ordinal) + ": " +
                           Words(functions_, result);
  return result == kOutOfMemory ? Exhausted(what) : Status::Io(EIO, what, {});
}

}  // namespace torch_ckpt
