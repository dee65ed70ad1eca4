// The CRC-32 of a part of a file.
#pragma once

#include <functional>

#include "format/ours/catalog.h"
#include "os/byte_source.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// Reads the range with a buffer of 8 MiB; `done` is called with the bytes of
// each step. kCancelled where `job` was.
Result<uint32_t> Crc32OfRange(
    const ByteSource& source, ByteRange range, Job* job,
    const std::function<void(uint64_t)>& done = [](uint64_t) {});

}  // namespace torch_ckpt
