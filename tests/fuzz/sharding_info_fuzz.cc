// The JSON inside __metadata__. The input is split at each 0xFF: the sharding
// info, the global shapes, the packed boxes.
#include <cstdlib>
#include <string>

#include "format/safetensors/sharding_info.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  SafetensorsHeader header;
  for (const std::string_view key :
       {kShardingInfoKey, kGlobalShapesKey, kPackedBoxesKey}) {
    const size_t cut = text.find('\xFF');
    header.metadata.emplace_back(key, text.substr(0, cut));
    if (cut == std::string::npos) break;
    text.erase(0, cut + 1);
  }
  header.tensors = {{"a", Dtype::kF32, {2, 3}, 0, 24},
                    {"b", Dtype::kF32, {}, 24, 28},
                    {"c", Dtype::kF4, {0, 4}, 28, 28},
                    {"p", Dtype::kI16, {6}, 28, 40}};
  const auto info = ParseShardingInfo(header);
  if (!info.ok()) return 0;
  if (info->entries.size() != header.tensors.size()) abort();
  for (size_t i = 0; i < info->entries.size(); ++i) {
    const ShardEntry& entry = info->entries[i];
    const Dims& shape = header.tensors[i].shape;
    if (entry.offsets.size() != shape.size()) abort();
    if (entry.packed.empty()
            ? entry.global_shape &&
                  !Inside({entry.offsets, shape}, *entry.global_shape)
            : !CheckPacked(header.tensors[i].dtype, shape, entry).ok())
      abort();
  }
  return 0;
}
