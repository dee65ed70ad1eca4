// From a pickled value to the typed JSON of object leaves (docs/format.md,
// section 7): what it is, without making it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/budget.h"
#include "base/status.h"
#include "format/torch/pickle.h"
#include "format/torch/tensor.h"

namespace torch_ckpt {

// The elements of a tensor of the value, in row-major order.
using TensorBytes = std::function<Result<std::string>(const TorchTensor&)>;

// One value, all of its data in the text. kUnsupported for what typed JSON
// cannot say, kCorrupt for what no pickler makes, kExhausted for what costs
// more than `budget` has, which is of all that are read together: the work of
// those that fail too, and the texts of the others.
Result<std::string> ObjectOfPickle(const PickleValue& value,
                                   const TensorBytes& tensor_bytes,
                                   Budget* budget);

}  // namespace torch_ckpt
