#include "os/machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "os/call.h"
#include "os/directory.h"
#include "os/path.h"

namespace torch_ckpt {
namespace {

std::optional<uint64_t> SoftLimit(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  const int result = internal::SystemCall(
      "getrlimit", {}, [&] { return getrlimit(resource, &limit); });
  if (result < 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// What stands in brackets: "always [madvise] never".
std::string Chosen(const std::string& path) {
  const std::string text = ReadSystemFile(path);
  const size_t open = text.find('['), close = text.find(']');
  if (open == text.npos || close == text.npos || close < open) return {};
  return text.substr(open + 1, close - open - 1);
}

}  // namespace

std::string ReadSystemFile(const std::string& path) {
  constexpr uint64_t kMaxBytes = 4096;
  const auto directory = Directory::Open(ParentPath(path));
  if (!directory.ok()) return {};
  const auto text = directory->ReadFile(BaseName(path), kMaxBytes);
  return text.ok() ? *text : std::string();
}

std::optional<uint64_t> OpenFilesLimit() { return SoftLimit(RLIMIT_NOFILE); }

std::optional<uint64_t> LockedMemoryLimit() {
  return SoftLimit(RLIMIT_MEMLOCK);
}

int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int result = internal::SystemCall("sched_getaffinity", {}, [&] {
    return sched_getaffinity(0, sizeof set, &set);
  });
  // More CPUs than the set has room for.
  if (result < 0) {
    return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  }
  return CPU_COUNT(&set);
}

std::string HugePagesOfMemory() {
  return Chosen("/sys/kernel/mm/transparent_hugepage/enabled");
}

std::string HugePagesOfSharedMemory() {
  return Chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
}

}  // namespace torch_ckpt
