// Names that Python gives files, and C++ only reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "format/names.h"

namespace torch_ckpt {

// SHARD_FILE in torch_ckpt/checkpoint/names.py: ranks count from 0, indices
// from 1.
inline std::string ShardFileName(int64_t rank, int64_t index, int64_t count) {
  const std::string number = std::to_string(rank + 1);
  const std::string zeros(5 - std::min<size_t>(5, number.size()), '0');
  return "shard-" + zeros + number + "-" + FinalFileName(index, count);
}

}  // namespace torch_ckpt
