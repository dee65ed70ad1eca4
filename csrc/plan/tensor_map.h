// A mapping of tensors, expanded: which elements of the tensors of a model are
// which of stored ones.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/box.h"
#include "base/status.h"
#include "plan/box_map.h"
#include "plan/view.h"

namespace torch_ckpt {

// One pair of a mapping: both are the same elements. `turned`: people wrote it
// the other way round.
struct MappingPair {
  std::string stored, native;
  bool turned = false;
};

// A tensor of a model, under its own name.
struct NativeTensor {
  std::string name;
  Dims shape;
};

// Of a native tensor (`from`) the elements that a stored one (`to`) has.
struct MappedPart {
  std::string stored;  // empty: zeros, of which `to` is `from`
  SelectionPair pair;
};

// Of a stored tensor what one native tensor has, where all native ones together
// do not have all of it. On a rank that has a part of a model others may have
// the rest.
struct PartlyUsed {
  std::string stored, native;
  int64_t elements = 0, of = 0;
};

struct TensorMap {
  // By the position of a native tensor that pairs name: each of its elements is
  // in one part.
  std::map<size_t, std::vector<MappedPart>> natives;
  // The stored tensors that pairs name. Each element is in one native tensor,
  // but for those of `partly`.
  std::map<std::string, Dims, std::less<>> stored;
  std::vector<PartlyUsed> partly;
  // The positions of pairs that mean no native tensor, or no stored one where
  // the native side is padding.
  std::vector<size_t> unmatched;
};

// The tensors of a checkpoint, by name.
using StoredShapes = std::map<std::string, Dims, std::less<>>;

// Native tensors that no pair names keep theirs, and are not in the result.
// kInvalidArgument names the pair and the tensors: for a syntax error, an
// overlap, a hole in a native tensor, a name that no stored tensor has, shapes
// that differ, a division that does not go; and a stored tensor that no native
// one has any of, though all are there that pairs name with it.
Result<TensorMap> MapTensors(const std::vector<MappingPair>& pairs,
                             const std::vector<NativeTensor>& natives,
                             const Numbers& numbers,
                             const StoredShapes& stored);

// The same for stored tensors that are to be made: their shapes are the
// smallest that have all elements of the native ones, which are all that there
// are. Then no element of one is in none.
Result<TensorMap> MapOntoNew(const std::vector<MappingPair>& pairs,
                             const std::vector<NativeTensor>& natives,
                             const Numbers& numbers);

// A name that the stored view of a pair means, both by their positions, and the
// name of the native tensor, where the stored one says it; else, and for
// padding, "".
struct NamedByPair {
  size_t name, pair;
  std::string native;
};

// Those of `names`, with all pairs that mean them.
Result<std::vector<NamedByPair>> NamedByPairs(
    const std::vector<MappingPair>& pairs,
    const std::vector<std::string>& names);

// The pairs with what `names` are as the native side: as they are, or turned,
// where the stored sides mean such names, or both sides do. kInvalidArgument
// where some are of the one side alone and some of the other.
Result<std::vector<MappingPair>> TurnedFor(
    const std::vector<MappingPair>& pairs,
    const std::vector<std::string>& names);

}  // namespace torch_ckpt
