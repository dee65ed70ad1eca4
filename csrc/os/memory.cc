#include "os/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "base/checked.h"
#include "os/call.h"

namespace torch_ckpt {

int internal::Advise(std::byte* data, size_t bytes, int advice) {
  return internal::SystemCall("madvise", std::to_string(advice),
                              [&] { return madvise(data, bytes, advice); });
}

int internal::Populate(std::byte* data, size_t bytes) {
  if (Advise(data, bytes, kPopulateWrite) == 0) return 0;
  // EINVAL: a kernel that knows the call, but not the advice.
  return errno == EINVAL || UnknownCall(errno) ? ENOSYS : errno;
}

namespace {

using internal::Advise;

Status NoMemory(const char* call, size_t bytes, int error) {
  const std::string what =
      std::string(call) + " of " + std::to_string(bytes) + " bytes";
  return Exhausted("the system gives no memory: " +
                   Status::Io(error, what, {}).message());
}

}  // namespace

Result<std::byte*> MapMemory(size_t bytes, size_t alignment) {
  // As much more as the alignment, cut off again at both ends.
  const size_t extra = bytes + alignment;
  void* raw = nullptr;
  const int mapped = internal::SystemCall("mmap", {}, [&] {
    raw = mmap(nullptr, extra, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return raw == MAP_FAILED ? -1 : 0;
  });
  if (mapped != 0) return NoMemory("mmap", extra, errno);
  auto* const begin = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t head = RoundUp(address, alignment) - address;
  if (head != 0) UnmapMemory(begin, head);
  std::byte* const data = begin + head;
  if (alignment != head) UnmapMemory(data + bytes, alignment - head);
  // Speed only: kernels without huge pages say EINVAL.
  (void)Advise(data, bytes, MADV_HUGEPAGE);
  // A child that only wants to exec must not copy page tables of gigabytes,
  // and device DMA must not meet copy-on-write pages.
  if (Advise(data, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    UnmapMemory(data, bytes);
    return NoMemory("madvise", bytes, error);
  }
  return data;
}

bool UnmapMemory(std::byte* data, size_t bytes) {
  return internal::SystemCall("munmap", {},
                              [&] { return munmap(data, bytes); }) == 0;
}

Status MakePresent(std::byte* data, size_t bytes) {
  const int error = internal::Populate(data, bytes);
  if (error == 0) return {};
  if (error != ENOSYS) return NoMemory("madvise", bytes, error);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < bytes; at += page) {
    *const_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  return {};
}

void PreferHugePages(std::byte* data, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const size_t head = RoundUp(address, page) - address;
  if (bytes < head + page) return;
  (void)Advise(data + head, (bytes - head) / page * page, MADV_HUGEPAGE);
}

void PreferSmallPages(std::byte* data, size_t bytes) {
  (void)Advise(data, bytes, MADV_NOHUGEPAGE);
}

}  // namespace torch_ckpt
