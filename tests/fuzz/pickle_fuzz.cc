// Pickles: bounded, and what they say is read as .metadata, as an object and as
// a state dict.
#include <cstdlib>
#include <string>

#include "format/dcp_metadata.h"
#include "format/pickle.h"
#include "format/pickle_object.h"
#include "format/torch_dtensor.h"
#include "format/torch_state.h"
#include "json/fields.h"
#include "plan/mesh.h"

using namespace torch_ckpt;

namespace {

// A DTensor, up to the boxes that its rank had.
void LookAt(const PickleValue& value) {
  if (!IsTorchTensor(value)) return;
  const auto rebuild = FindTorchRebuild(value);
  if (!rebuild.ok() || !IsTorchDTensor(*rebuild)) return;
  const auto found = ReadTorchDTensor(*rebuild);
  if (!found.ok()) return;
  constexpr size_t kMost = 1000;
  const auto boxes =
      ExpandRule(found->shape, found->rule, found->coordinate, kMost);
  if (boxes.ok() && boxes->size() > kMost) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes{reinterpret_cast<const std::byte*>(data), size};
  const auto pickle = Pickle::Parse(bytes, UnknownNames::kRecord);
  if (!pickle.ok()) return 0;
  if (pickle->bytes() > size) abort();
  const auto metadata = ParseDcpMetadata(bytes);
  if (metadata.ok() && !metadata->catalog.Encode().ok()) abort();
  const auto object = ObjectOfPickle(pickle->root(), [](const TorchTensor&) {
    return Result<std::string>(std::string());
  });
  if (object.ok() && !Json::accept(*object)) abort();
  const auto state = FlattenState(pickle->root(), pickle->bytes());
  if (state.ok()) {
    const std::string structure = StructureJson(state->containers);
    if (!structure.empty() && !Json::accept(structure)) abort();
    for (const StateLeaf& leaf : state->leaves) {
      if (!leaf.path.empty() && !Json::accept(leaf.path)) abort();
      LookAt(*leaf.value);
    }
  }
  return 0;
}
