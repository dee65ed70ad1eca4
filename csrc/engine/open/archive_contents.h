// What the archives of a checkpoint of others say of their own bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/open/torch_archive.h"
#include "os/byte_source.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// The entries of one of Checkpoint::Archives; none of a blob of safetensors,
// which has no digests. kCorrupt where it is no archive any more.
Result<std::vector<ZipContent>> ContentsOf(const Checkpoint& checkpoint,
                                           const Checkpoint::Archive& archive);

// What CheckContent wants of memory.
inline constexpr uint64_t kContentScratch =
    (uint64_t{8} << 20) + ByteSource::kSlack;

// Reads the content and compares it with its CRC-32. `done` is called with the
// bytes of every step. kCorrupt names the file; kCancelled where `job` was.
Status CheckContent(const ByteSource& source, const ZipContent& content,
                    MutableByteSpan scratch, const Job* job,
                    const std::function<void(uint64_t)>& done);
// Of a content whose CRC-32 is `crc`.
Status CheckContent(const std::string& path, const ZipContent& content,
                    uint32_t crc);

}  // namespace torch_ckpt
