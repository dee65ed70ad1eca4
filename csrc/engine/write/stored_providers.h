// Tensors and files of an opened checkpoint, as the bytes of outputs.
#pragma once

#include "engine/write/provider.h"
#include "engine/write/stored_inputs.h"

namespace torch_ckpt {

// Things are entries of the catalog: tensors, whole, in row-major order.
class StoredTensors final : public Provider {
 public:
  explicit StoredTensors(StoredInputs* inputs) : inputs_(inputs) {}

  uint64_t ScratchBytes() const override { return StoredInputs::kScratchBytes; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  StoredInputs* const inputs_;
};

// Things are files of the checkpoint.
class StoredFiles final : public Provider {
 public:
  explicit StoredFiles(StoredInputs* inputs) : inputs_(inputs) {}

  uint64_t ScratchBytes() const override { return StoredInputs::kScratchBytes; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  StoredInputs* const inputs_;
};

}  // namespace torch_ckpt
