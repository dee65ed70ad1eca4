// CRC-32s of ranges of an output, taken while its bytes pass: archives say one
// of each of their entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/byte_range.h"
#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

class OutputCrcs {
 public:
  // Of ranges that ascend and lie apart.
  explicit OutputCrcs(std::vector<ByteRange> ranges);

  // Bytes of the output, each once, in any order and from any thread.
  void Add(uint64_t offset, ByteSpan bytes);
  // Of a range, by its position, when all was added; kInternal where some was
  // not.
  Result<uint32_t> Find(size_t range);

 private:
  struct Added {
    ByteRange bytes;
    uint32_t crc32;
  };
  const std::vector<ByteRange> ranges_;
  std::mutex mutex_;
  std::vector<std::vector<Added>> added_;  // by range
};

}  // namespace torch_ckpt
