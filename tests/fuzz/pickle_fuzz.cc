// Pickles: bounded, and what they say is read as .metadata and as an object.
#include <cstdlib>
#include <string>

#include "format/dcp_metadata.h"
#include "format/pickle.h"
#include "format/pickle_object.h"
#include "json/fields.h"

using namespace torch_ckpt;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes{reinterpret_cast<const std::byte*>(data), size};
  const auto pickle = Pickle::Parse(bytes);
  if (!pickle.ok()) return 0;
  if (pickle->bytes() > size) abort();
  const auto metadata = ParseDcpMetadata(bytes);
  if (metadata.ok() && !metadata->catalog.Encode().ok()) abort();
  const auto object = ObjectOfPickle(pickle->root(), [](const TorchTensor&) {
    return Result<std::string>(std::string());
  });
  if (object.ok() && !Json::accept(*object)) abort();
  return 0;
}
