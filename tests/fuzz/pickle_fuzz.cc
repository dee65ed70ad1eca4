// Pickles: bounded, and what they say is read as an object and as a state dict.
#include <cstdlib>
#include <string>

#include "format/torch/dtensor.h"
#include "format/torch/pickle.h"
#include "format/torch/pickle_object.h"
#include "format/torch/state.h"
#include "format/torch/unread.h"
#include "json/fields.h"
#include "plan/mesh.h"

using namespace torch_ckpt;

namespace {

// Of an object anyway: what is looked for shows in less than it may have.
constexpr uint64_t kMostText = uint64_t{1} << 20;

// A DTensor, up to the boxes that its rank had; what is said of others.
void LookAt(const PickleValue& value, Budget* budget) {
  if (IsAnyTensor(value) && DescribeUnread(value, {}).reason.empty()) abort();
  if (!IsTorchTensor(value)) return;
  const auto rebuild = FindTorchRebuild(value);
  if (!IsTorchDTensor(rebuild)) return;
  const auto found = ReadTorchDTensor(rebuild, budget);
  if (!found.ok()) return;
  ExpandRule(found->shape, found->rule, found->coordinate, budget)
      .status()
      .ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteSpan bytes{reinterpret_cast<const std::byte*>(data), size};
  const auto pickle = Pickle::Parse(bytes, UnknownNames::kRecord);
  if (!pickle.ok()) return 0;
  if (pickle->bytes() > size) abort();
  Budget of_object("the pickle", size);
  if (!of_object.Keep(Budget::kKeptAnyway - kMostText)) abort();
  const auto object = ObjectOfPickle(
      pickle->root(),
      [](const TorchTensor&) { return Result<std::string>(std::string()); },
      &of_object);
  if (object.ok() && !Json::accept(*object)) abort();
  Budget of_state("the pickle", size);
  const auto state = FlattenState(pickle->root(), &of_state);
  if (state.ok()) {
    const std::string structure = StructureJson(state->containers);
    if (!structure.empty() && !Json::accept(structure)) abort();
    for (const StateLeaf& leaf : state->leaves) {
      if (!leaf.path.empty() && !Json::accept(leaf.path)) abort();
      LookAt(*leaf.value, &of_state);
    }
  }
  return 0;
}
