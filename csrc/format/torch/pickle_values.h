// Values of Python and numpy that a pickle spells out in several objects.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/budget.h"
#include "base/status.h"
#include "format/torch/pickle.h"

namespace torch_ckpt {

// How deep what becomes an object of ours may nest.
inline constexpr int kMaxNestedContainers = 100;

// Bytes or a bytearray, which protocol 2 makes of text: each character is one.
// kCorrupt for anything else.
Result<std::string> BytesOfPickle(const PickleValue& value, Budget* budget);

// "<f4" of numpy.dtype("f4", ...) with the state (3, "<", None, None, None,
// ...), and "<M8[D]" where that ends with (None, (b"D", 1, 1, 1)). kUnsupported
// for types of several fields and for what is no type.
Result<std::string> ArrayTypeOfPickle(const PickleValue& value, Budget* budget);

// The word of typed JSON for the default_factory of `value`, a defaultdict;
// nullopt for one that has none.
std::optional<std::string_view> FactoryOfDefaultDict(const PickleValue& value);

}  // namespace torch_ckpt
