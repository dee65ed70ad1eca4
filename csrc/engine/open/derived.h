// Tensors that are made of parts of stored ones: groups of experts, fused
// matrices, other names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/ours/catalog.h"
#include "plan/box_map.h"
#include "plan/view.h"

namespace torch_ckpt {

class Checkpoint;

// One pair of a mapping, as people write it: both are the same elements.
struct MappingPair {
  std::string stored, native;
};

// What somebody wants: a tensor of a model, under its own name.
struct NativeTensor {
  std::string name;
  Dims shape;
};

// Of a native tensor (`from`) the elements that a stored one (`to`) has.
struct DerivedPart {
  std::string stored;  // empty: zeros, of which `to` is `from`
  SelectionPair pair;
};

struct DerivedTensor {
  std::vector<DerivedPart> parts;  // each element is in one
  bool scaled = false;             // some are codes that become numbers
};

// Of a stored tensor what one native tensor has, where all native ones together
// do not have all of it. On a rank that has a part of a model others may have
// the rest.
struct PartlyUsed {
  std::string stored, native;
  int64_t elements = 0, of = 0;
};

struct MappedCatalog {
  // With native tensors in place of the stored ones that they are made of,
  // which have no placements; all others under their own names.
  Catalog catalog;
  std::map<std::string, DerivedTensor, std::less<>> derived;
  std::vector<PartlyUsed> partly;
};

// Native tensors that no pair names keep theirs. kInvalidArgument names the
// pair and the tensors: for a syntax error, an overlap, a hole in a native
// tensor, a name that no stored tensor has, shapes that differ, a division that
// does not go.
Result<MappedCatalog> MapTensors(const Checkpoint& checkpoint,
                                 const std::vector<MappingPair>& pairs,
                                 const std::vector<NativeTensor>& natives,
                                 const Numbers& numbers);

}  // namespace torch_ckpt
