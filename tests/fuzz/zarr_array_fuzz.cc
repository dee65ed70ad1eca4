// .zarray: what is taken has chunks of a whole number of bytes. And names of
// chunks: each that is one is spelled in one way.
#include <cstdlib>
#include <string_view>

#include "format/zarr/zarr_array.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto array = ParseZarrArray(text);
  if (array.ok()) {
    if (array->shape.size() != array->chunks.size()) abort();
    for (const int64_t chunk : array->chunks) {
      if (chunk <= 0) abort();
    }
    if (array->other_dtype.empty() &&
        !ByteSize(array->dtype, array->chunks).ok()) {
      abort();
    }
  }
  for (int dims = 0; dims <= kMaxDims; ++dims) {
    const auto chunk = ParseZarrChunkName(text, dims);
    if (!chunk) continue;
    const auto count = static_cast<size_t>(chunk->size());
    if (chunk->size() != dims || ZarrChunkName({chunk->begin(), count}) != text)
      abort();
  }
  return 0;
}
