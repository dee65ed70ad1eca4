// What a pickle of torch.save says of a tensor: its type, its shape, and where
// in which storage its elements are.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/box.h"
#include "base/status.h"
#include "format/dtype.h"
#include "format/torch/pickle.h"

namespace torch_ckpt {

struct TorchTensor {
  Dtype dtype = Dtype::kU8;
  Dims shape;                // in elements
  Dims strides;              // in bytes
  uint64_t begin = 0;        // of the first element, in bytes of the storage
  uint64_t end = 0;          // behind the last element
  std::string_view storage;  // its key: the entry data/<key> of the archive
  // Of the storage: torch rounds down where it was another type's before.
  uint64_t storage_elements = 0, storage_element_bytes = 1;
};

// Whether `value` is a strided tensor or a DTensor, or a parameter of one;
// IsAnyTensor is of all kinds.
bool IsTorchTensor(const PickleValue& value);

// What rebuilds a tensor, behind the parameters and attributes around it.
struct TorchRebuild {
  PickleName function{};
  std::span<const PickleValue> arguments;
  PickleName type = PickleName::kTensor;
  const PickleValue* state = nullptr;  // of a class; else null
  bool is_parameter = false, requires_grad = false;
};
// REQUIRES: IsTorchTensor(value).
TorchRebuild FindTorchRebuild(const PickleValue& value);
bool IsTorchDTensor(const TorchRebuild& rebuild);

// REQUIRES: IsTorchTensor(value). kUnsupported for what is no dense tensor of
// this machine's byte order, DTensors included, kCorrupt for numbers that make
// no sense. That the storage is there, has so many elements and holds `end`
// bytes is for the caller to check.
Result<TorchTensor> ReadTorchTensor(const PickleValue& value);

// A torch.Size, or a tuple or list of numbers. kCorrupt for anything else,
// kUnsupported above kMaxDims.
Result<Dims> ReadSize(const PickleValue& value);

}  // namespace torch_ckpt
