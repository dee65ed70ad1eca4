#include "os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <string>
#include <utility>

#include "base/checked.h"
#include "os/allocate.h"
#include "os/call.h"
#include "os/memory.h"

namespace torch_ckpt {
namespace {

const char kName[] = "torch_ckpt";

// Addresses cost nothing; this many, so that gaps in between do no harm.
uint64_t RangeBytes(size_t alignment) {
  const auto pages = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return RoundUp(8 * pages * page, alignment);
}

// Nothing there and nothing allowed, at `at` if that is not null.
std::byte* Reserve(std::byte* at, size_t bytes) {
  void* raw = MAP_FAILED;
  (void)internal::SystemCall("mmap", kName, [&] {
    raw = mmap(at, bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE |
                   (at == nullptr ? 0 : MAP_FIXED),
               -1, 0);
    return raw == MAP_FAILED ? -1 : 0;
  });
  return raw == MAP_FAILED ? nullptr : static_cast<std::byte*>(raw);
}

// At `at` if that is not null; null with errno on failure.
std::byte* MapFile(int fd, uint64_t offset, size_t bytes, std::byte* at) {
  void* raw = MAP_FAILED;
  (void)internal::SystemCall("mmap", kName, [&] {
    raw = mmap(at, bytes, PROT_READ | PROT_WRITE,
               MAP_SHARED | (at == nullptr ? 0 : MAP_FIXED), fd,
               static_cast<off_t>(offset));
    return raw == MAP_FAILED ? -1 : 0;
  });
  return raw == MAP_FAILED ? nullptr : static_cast<std::byte*>(raw);
}

int PunchHole(int fd, uint64_t offset, uint64_t bytes) {
  return internal::Allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            offset, bytes, kName);
}

Status Refused(const char* call, int error) {
  return Unsupported("no memory can be shared with other processes: " +
                     Status::Io(error, call, {}).message());
}

Status NothingToShare(const char* call, size_t bytes, int error) {
  return Exhausted(
      "the system gives no memory to share: " +
      Status::Io(error,
                 std::string(call) + " of " + std::to_string(bytes) + " bytes",
                 {})
          .message());
}

std::string Descriptor(int fd) { return "descriptor " + std::to_string(fd); }

}  // namespace

Result<std::unique_ptr<SharedMemory>> SharedMemory::Create(size_t alignment) {
  const uint64_t size = RangeBytes(alignment);
  // Past this limit ftruncate sends a signal that ends the process.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < size) {
    return Refused("ftruncate", EFBIG);
  }
  const int fd = internal::SystemCall("memfd_create", kName, [&] {
    return memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  });
  if (fd < 0) return Refused("memfd_create", errno);
  File file(fd, kName);
  if (internal::SystemCall("ftruncate", kName, [&] {
        return ftruncate(fd, static_cast<off_t>(size));
      }) != 0) {
    return Refused("ftruncate", errno);
  }
  if (internal::SystemCall("fcntl", kName, [&] {
        return fcntl(fd, F_ADD_SEALS,
                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
      }) != 0) {
    return Refused("fcntl", errno);
  }
  // Or what is unmapped would never be free again.
  if (PunchHole(fd, 0, alignment) != 0) return Refused("fallocate", errno);
  std::byte* const begin = Reserve(nullptr, size + alignment);
  if (begin == nullptr) return Refused("mmap", errno);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t head = RoundUp(address, alignment) - address;
  if (head != 0) UnmapMemory(begin, head);
  std::byte* const base = begin + head;
  if (alignment != head) UnmapMemory(base + size, alignment - head);
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(std::move(file), base, size));
}

SharedMemory::SharedMemory(File file, std::byte* base, size_t size)
    : file_(std::move(file)), base_(base), size_(size), gaps_{{base, size}} {}

SharedMemory::~SharedMemory() { (void)UnmapMemory(base_, size_); }

Result<std::byte*> SharedMemory::Map(size_t bytes) {
  std::byte* data = nullptr;
  {
    // The lowest gap: stretches stay close.
    std::lock_guard<std::mutex> lock(mutex_);
    auto gap = gaps_.begin();
    while (gap != gaps_.end() && gap->second < bytes) ++gap;
    if (gap == gaps_.end()) {
      return Exhausted("no gap of " + std::to_string(bytes) +
                       " bytes in the addresses of shared memory");
    }
    data = gap->first;
    auto rest = gaps_.extract(gap);
    rest.key() += bytes;
    rest.mapped() -= bytes;
    if (rest.mapped() > 0) gaps_.insert(std::move(rest));
  }
  const uint64_t offset = OffsetOf(data);
  if (MapFile(fd(), offset, bytes, data) == nullptr) {
    const int error = errno;
    AddGap(data, bytes);
    return NothingToShare("mmap", bytes, error);
  }
  // Speed only: kernels without huge pages for such files say EINVAL.
  (void)internal::Advise(data, bytes, MADV_HUGEPAGE);
  if (internal::Advise(data, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    AddGap(data, bytes);
    return NothingToShare("madvise", bytes, error);
  }
  return data;
}

Status SharedMemory::MakePresent(std::byte* data, size_t bytes) {
  const int error = internal::Populate(data, bytes);
  if (error == 0) return {};
  if (error != ENOSYS) return NothingToShare("madvise", bytes, error);
  // Never by touching pages: where there is no memory for one of a file, that
  // is SIGBUS.
  if (internal::Allocate(fd(), FALLOC_FL_KEEP_SIZE, OffsetOf(data), bytes,
                         kName) == 0) {
    return {};
  }
  return NothingToShare("fallocate", bytes, errno);
}

bool SharedMemory::Unmap(std::byte* data, size_t bytes) {
  if (PunchHole(fd(), OffsetOf(data), bytes) != 0) return false;
  AddGap(data, bytes);
  return true;
}

void SharedMemory::AddGap(std::byte* data, size_t bytes) {
  // Best effort: a mapping that stays is replaced by the next one here.
  (void)Reserve(data, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    AddStretch(&gaps_, data, bytes);
  } catch (const std::bad_alloc&) {
    // The addresses are lost, the memory is not.
  }
}

Result<SharedRange> FindShared(int fd, uint64_t offset, size_t bytes) {
  const std::string what = Descriptor(fd);
  const int seals = internal::SystemCall(
      "fcntl", kName, [&] { return fcntl(fd, F_GET_SEALS); });
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return InvalidArgument(what + " is no memory file of a fixed size");
  }
  struct stat st{};
  if (internal::SystemCall("fstat", kName, [&] { return fstat(fd, &st); })) {
    return Status::Io(errno, "fstat", what);
  }
  const auto end = static_cast<uint64_t>(st.st_size);
  if (offset > end || bytes > end - offset) {
    return InvalidArgument(what + " ends at byte " + std::to_string(end) +
                           ", before byte " + std::to_string(offset) + " + " +
                           std::to_string(bytes));
  }
  return SharedRange{st.st_dev, st.st_ino, offset, bytes};
}

Result<std::byte*> MapShared(int fd, const SharedRange& range) {
  std::byte* const data = MapFile(fd, range.offset, range.bytes, nullptr);
  if (data == nullptr) return Status::Io(errno, "mmap", Descriptor(fd));
  // A child that only wants to exec must not copy the page tables.
  (void)internal::Advise(data, range.bytes, MADV_DONTFORK);
  return data;
}

}  // namespace torch_ckpt
