// .metadata of stock DCP: what it says becomes a catalog that can be encoded,
// each placement inside of the file that is named.
#include <cstdlib>

#include "format/ours/catalog.h"
#include "format/torch/dcp_metadata.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes{reinterpret_cast<const std::byte*>(data), size};
  Budget budget("the pickle", size);
  auto metadata = ParseDcpMetadata(bytes, &budget, "common_state");
  if (!metadata.ok()) return 0;
  std::vector<ManifestFile> files;
  for (const DcpFile& file : metadata->files) {
    files.push_back({file.name, "", FileRole::kData, file.bytes, {}});
  }
  const auto catalog = Catalog::From(std::move(metadata->catalog), files);
  if (!catalog.ok()) abort();
  for (uint32_t e = 0; e < catalog->entries().size(); ++e) {
    if (!catalog->Placements(e, files).ok()) abort();
  }
  return 0;
}
