// Tensors that are made of parts of stored ones: groups of experts, fused
// matrices, other names.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/ours/catalog.h"
#include "plan/tensor_map.h"

namespace torch_ckpt {

class Checkpoint;

struct DerivedTensor {
  std::vector<MappedPart> parts;  // each element is in one
  bool scaled = false;            // some are codes that become numbers
};

struct MappedCatalog {
  // With native tensors in place of the stored ones that they are made of,
  // which have no placements; all others under their own names.
  Catalog catalog;
  std::map<std::string, DerivedTensor, std::less<>> derived;
  std::vector<PartlyUsed> partly;  // of TensorMap, as the next one
  std::vector<size_t> unmatched;
};

// The catalog of a checkpoint as a model has its tensors. What MapTensors
// (plan/tensor_map.h) says; kUnsupported for parts of one tensor that have
// several dtypes, or are not read.
Result<MappedCatalog> DeriveCatalog(const Checkpoint& checkpoint,
                                    const std::vector<MappingPair>& pairs,
                                    const std::vector<NativeTensor>& natives,
                                    const Numbers& numbers);

// The catalog of a checkpoint with the tensors that pairs make of its own, the
// way that TurnedFor finds: those of MapOntoNew.
Result<MappedCatalog> DeriveNewCatalog(const Checkpoint& checkpoint,
                                       const std::vector<MappingPair>& pairs,
                                       const Numbers& numbers);

}  // namespace torch_ckpt
