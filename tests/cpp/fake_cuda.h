// The tests' hold on fake_cuda.cc, a library of its own that CMake builds.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <string>

namespace torch_ckpt {

inline constexpr uintptr_t kFakeDeviceBit = uintptr_t{1} << 62;

class FakeCuda {
 public:
  // The paths are those that CMake gives.
  static const char* Path() { return TORCH_CKPT_FAKE_CUDA; }
  // A driver of its own, before 12.8: without batches of copies.
  static const char* OldPath() { return TORCH_CKPT_FAKE_OLD_CUDA; }

  // Makes the process's driver the fake; before the driver's first use.
  static void UseForProcess() {
    ASSERT_EQ(setenv("TORCH_CKPT_LIBCUDA", Path(), 1), 0);
  }

  explicit FakeCuda(const char* path = Path())
      : library_(dlopen(path, RTLD_NOW)) {
    EXPECT_NE(library_, nullptr) << dlerror();
    Function<void()>("fake_cuda_reset")();
  }
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;
  ~FakeCuda() {
    Function<void()>("fake_cuda_reset")();
    dlclose(library_);
  }

  // Of an entry point, or "copy": one in whichever way, in batches too.
  int Calls(const char* name) const {
    return Function<int(const char*)>("fake_cuda_calls")(name);
  }
  void Fail(const char* name, int call, int result) const {
    Function<void(const char*, int, int)>("fake_cuda_fail")(name, call, result);
  }
  // What is on the device is in allocations that nobody knows, but for these.
  void Allocate(const std::byte* on_device, size_t size) const {
    Function<void(uintptr_t, size_t)>("fake_cuda_allocate")(
        reinterpret_cast<uintptr_t>(on_device), size);
  }
  int LiveStreams() const { return Count("fake_cuda_live_streams"); }
  int LockedRanges() const { return Count("fake_cuda_locked_ranges"); }
  int PendingCopies() const { return Count("fake_cuda_pending_copies"); }

  // What the fake takes for the device's address of host memory. Touching it
  // as host memory ends the process.
  static const std::byte* OnDevice(const void* data) {
    return reinterpret_cast<const std::byte*>(
        reinterpret_cast<uintptr_t>(data) | kFakeDeviceBit);
  }

 private:
  int Count(const char* name) const { return Function<int()>(name)(); }

  template <class F>
  F* Function(const char* name) const {
    return reinterpret_cast<F*>(dlsym(library_, name));
  }

  void* const library_;
};

}  // namespace torch_ckpt
