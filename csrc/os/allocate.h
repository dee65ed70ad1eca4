// Blocks of a file, reserved in a way that signals cannot keep from ending.
// For the files of os/ only.
#pragma once

#include <cstdint>
#include <string>

namespace torch_ckpt::internal {

// fallocate(2) of a range, in steps. tmpfs of older kernels ends the call with
// EINTR at any signal and undoes all of it: under a profiler's timer one that
// takes longer than a tick never ends. So this thread takes no signals during a
// step, and a step that is cut off all the same is made again a few times only.
// Below 0 with errno on failure; earlier steps stay reserved then.
int Allocate(int fd, int mode, uint64_t offset, uint64_t bytes,
             const std::string& path);

}  // namespace torch_ckpt::internal
