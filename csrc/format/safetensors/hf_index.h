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
  // Bytes of tensor data; 0 when absent, or no number: a hint, whatever it is.
  uint64_t total_size = 0;
  // fqn and file, a path below the directory.
  std::vector<std::pair<std::string, std::string>> weight_map;
};

// Strict where it says which file: no duplicate keys, paths that end in
// `suffix` ("./" before them is dropped), strings where strings are due. Other
// keys of "metadata" are ignored, and a byte order mark is. Caps: 512 MiB,
// 10 M names.
Result<HfIndex> ParseHfIndex(ByteSpan text,
                             std::string_view suffix = kDataSuffix);
std::string BuildHfIndex(const HfIndex& index);  // two-space indent, as stock

}  // namespace torch_ckpt
