// model.safetensors.index.json: names that are accepted are plain, and what we
// write of it is read back the same.
#include <cstdlib>

#include "format/names.h"
#include "format/safetensors/hf_index.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto index =
      ParseHfIndex({reinterpret_cast<const std::byte*>(data), size});
  if (!index.ok()) return 0;
  for (const auto& [name, file] : index->weight_map) {
    if (!CheckFilePath(file).ok()) abort();
  }
  const std::string text = BuildHfIndex(*index);
  const auto again = ParseHfIndex(AsBytes(text));
  if (!again.ok() || again->weight_map != index->weight_map ||
      again->total_size != index->total_size)
    abort();
  return 0;
}
