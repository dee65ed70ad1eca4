// From a pickled value to the typed JSON of object leaves (docs/format.md,
// section 7): what it is, without making it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/pickle.h"
#include "format/torch_tensor.h"

namespace torch_ckpt {

inline constexpr size_t kMaxObjectText = size_t{256} << 20;

// The elements of a tensor of the value, in row-major order.
using TensorBytes = std::function<Result<std::string>(const TorchTensor&)>;

// One value, all of its data in the text. kUnsupported for what typed JSON
// cannot say, kCorrupt for what no pickler makes, kExhausted for a longer text.
Result<std::string> ObjectOfPickle(const PickleValue& value,
                                   const TensorBytes& tensor_bytes,
                                   size_t most = kMaxObjectText);

}  // namespace torch_ckpt
