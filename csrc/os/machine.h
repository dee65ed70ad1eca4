// What the system lets this process have. For reports.
//
// All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torch_ckpt {

// A small file of the system's, as in /proc; empty when it cannot be read.
std::string ReadSystemFile(const std::string& path);

// How many files this process may have open, and how many bytes of memory it
// may lock: the soft limits; nullopt where there is none.
std::optional<uint64_t> OpenFilesLimit();
std::optional<uint64_t> LockedMemoryLimit();

// The CPUs that this process may run on.
int UsableCpus();

// When the kernel makes huge pages of anonymous memory, or of shared memory:
// "always", "madvise", "never", "advise", ...; empty where it has none.
std::string HugePagesOfMemory();
std::string HugePagesOfSharedMemory();

}  // namespace torch_ckpt
