// What a file system can do.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "os/directory.h"
#include "os/file.h"

namespace torch_ckpt {

struct DirectIo {
  // False where the kernel says that O_DIRECT does not work on the file. Where
  // it cannot tell, only a transfer can, which may be refused.
  bool supported = true;
  // What addresses, and what offsets and lengths, must be multiples of: powers
  // of two. Where the kernel does not tell, a page, and 4096 at the least.
  uint32_t memory_alignment = 4096, offset_alignment = 4096;
};

// Asks about an open regular file (statx STATX_DIOALIGN, Linux 6.1); its
// descriptor stays as it is. May be called from any thread.
Result<DirectIo> ProbeDirectIo(const File& file);

// How many descriptors this process may still open: the soft limit less those
// that are open. A guess where /proc cannot be read. May be called from any
// thread.
uint64_t FreeDescriptors();

// Tries in `directory` what a save does and an object store behind a mount may
// lack: writes out of order, and renames. kUnsupported, naming the file system,
// where it cannot; the file that was tried with is gone again.
Status ProbeWrites(const Directory& directory);

// "ext4", "xfs", "nfs", ...; "0x" and the magic number in hex for one that has
// no name here. For messages and reports, never to decide what to do.
Result<std::string> FileSystemName(const Directory& directory);

// Whether other nodes may change what is in `directory`, so that caches of this
// one may show what was there before: false for the kinds of file systems that
// only one node mounts, true for all others and where it cannot be told.
bool IsShared(const Directory& directory);

}  // namespace torch_ckpt
