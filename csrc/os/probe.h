// What a file system can do.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "os/directory.h"
#include "os/file.h"

namespace torch_ckpt {

struct DirectIo {
  // Whether O_DIRECT works on the file. Where the kernel cannot tell, whether
  // an open with it is taken; such a file system may still refuse the first
  // transfer, so callers keep a buffered way.
  bool supported = false;
  // What addresses, and what offsets and lengths, must be multiples of; 4096
  // where the kernel does not tell.
  uint32_t memory_alignment = 4096, offset_alignment = 4096;
};

// Asks about an open regular file (statx STATX_DIOALIGN, Linux 6.1); its
// descriptor stays as it is. May be called from any thread.
Result<DirectIo> ProbeDirectIo(const File& file);

// Tries in `directory` what a save does and an object store behind a mount may
// lack: writes out of order, and renames. kUnsupported, naming the file system,
// where it cannot; the file that was tried with is gone again.
Status ProbeWrites(const Directory& directory);

// "ext4", "xfs", "nfs", ...; "0x" and the magic number in hex for one that has
// no name here. For messages and reports, never to decide what to do.
Result<std::string> FileSystemName(int fd, const std::string& path);

}  // namespace torch_ckpt
