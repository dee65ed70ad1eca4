// The JSON inside __metadata__. The input is split at the first 0xFF: before
// it the sharding info, behind it the global shapes.
#include <cstdlib>
#include <string>

#include "format/safetensors/sharding_info.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find('\xFF');
  SafetensorsHeader header;
  header.metadata.emplace_back(kShardingInfoKey, text.substr(0, cut));
  if (cut != std::string::npos)
    header.metadata.emplace_back(kGlobalShapesKey, text.substr(cut + 1));
  header.tensors = {{"a", Dtype::kF32, {2, 3}, 0, 24},
                    {"b", Dtype::kF32, {}, 24, 28},
                    {"c", Dtype::kF4, {0, 4}, 28, 28}};
  const auto info = ParseShardingInfo(header);
  if (!info.ok()) return 0;
  if (info->entries.size() != header.tensors.size()) abort();
  for (size_t i = 0; i < info->entries.size(); ++i) {
    const ShardEntry& entry = info->entries[i];
    const Box box{entry.offsets, header.tensors[i].shape};
    if (entry.offsets.size() != box.sizes.size()) abort();
    if (entry.global_shape && !Inside(box, *entry.global_shape)) abort();
  }
  return 0;
}
