// model.safetensors.index.json: {"metadata": {...}, "weight_map": {fqn: file}}
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/names.h"

namespace torch_ckpt {

inline constexpr uint64_t kMaxIndexBytes = uint64_t{512} << 20;

struct HfIndex {
  uint64_t total_size = 0;  // bytes of tensor data; 0 when absent
  std::vector<std::pair<std::string, std::string>> weight_map;  // fqn, file
};

// Strict: no duplicate keys, plain file names that end in `suffix`, strings
// where strings are due. Other keys of "metadata" are ignored. Caps: 512 MiB,
// 10 M names.
Result<HfIndex> ParseHfIndex(ByteSpan text,
                             std::string_view suffix = kDataSuffix);
std::string BuildHfIndex(const HfIndex& index);  // two-space indent, as stock

}  // namespace torch_ckpt
