// Tensors in pickles that are not read, as sparse or quantized ones and those
// of somebody's class: what is said of them.
#pragma once

#include <string>
#include <string_view>

#include "base/budget.h"
#include "format/ours/catalog.h"
#include "format/torch/pickle.h"

namespace torch_ckpt {

// Whether some function of torch makes a tensor of it, of whatever kind. What
// a class of somebody's pickles in a way of its own is no tensor here.
bool IsAnyTensor(const PickleValue& value);

// REQUIRES: IsAnyTensor(value). `why`: what ReadTorchTensor, or whoever else
// would read it, says of it; empty: it is of no kind that these know.
UnreadTensor DescribeUnread(const PickleValue& value, std::string_view why);

// Why a value that is no tensor cannot be taken for one without any: it has one
// inside that is not read, or some and an object of a class that nobody here
// knows. Empty where it can. `budget` is for all such looks into one pickle;
// where it is over, that is a reason as well.
std::string FindHiddenTensor(const PickleValue& value, Budget* budget);

// What torch calls the dtype that a pickle names, without "torch."; empty where
// it names none.
std::string_view NamedDtype(const PickleValue& value);

}  // namespace torch_ckpt
