// The state dict that a pickle of torch.save is, flattened as DCP does it: its
// leaves under names that are joined by dots.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/budget.h"
#include "base/status.h"
#include "format/torch/pickle.h"

namespace torch_ckpt {

// The object in which structures are kept (docs/format.md, section 7).
inline constexpr std::string_view kStructureName = "torch_ckpt.structure";

struct StateLeaf {
  std::string name;
  // Where it stands, as JSON text; empty where that is (name,).
  std::string path;
  const PickleValue* value = nullptr;
};

// A container that the names of leaves do not describe.
struct StateContainer {
  std::string path;               // JSON text
  std::string kind;               // as in the structure
  size_t count = 0;               // of a list
  std::vector<std::string> keys;  // of a mapping, as JSON text
};

struct TorchState {
  std::vector<StateLeaf> leaves;  // in the order of the pickle
  std::vector<StateContainer> containers;
};

// Mappings are opened, and lists that hold tensors or mappings; tuples never.
// A list of nothing but one mapping, as Megatron saves objects, is that
// mapping.
// `root` lives as long as the result is used. `budget`: of its pickle.
// kUnsupported for what is no mapping, for keys that are no text, numbers or
// None, or longer than any name, and for containers deeper than 100; kConflict
// where two leaves have one name, kExhausted above `budget`, and for
// more leaves than 2 million, or than its bytes account for.
Result<TorchState> FlattenState(const PickleValue& root, Budget* budget);

// The structure as typed JSON; empty where there are no containers.
std::string StructureJson(const std::vector<StateContainer>& containers);

}  // namespace torch_ckpt
