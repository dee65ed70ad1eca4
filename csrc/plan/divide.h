// Which of several final files each tensor goes to.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

struct FileRule {
  // Name and index of its file, from 1 to kMaxFileIndex.
  std::optional<std::vector<std::pair<std::string, int64_t>>> mapping;
  // Without a mapping: a file takes tensors in their order while their bytes
  // are no more than this, and at least one. 0: one file for all.
  uint64_t max_bytes = 0;
};
inline constexpr int64_t kMaxFileIndex = 99'999;

struct FileDivision {
  std::vector<int64_t> index;  // of each tensor's file; 0: the mapping lacks it
  int64_t count = 1;           // of the files, by the highest index
};

// kInvalidArgument, naming the tensor, for an index out of bounds; also where
// the sizes make for more files than that.
Result<FileDivision> DivideIntoFiles(std::span<const std::string_view> names,
                                     std::span<const uint64_t> bytes,
                                     const FileRule& rule);

}  // namespace torch_ckpt
