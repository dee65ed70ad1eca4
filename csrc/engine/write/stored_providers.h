// Stored tensors and files, as the bytes of outputs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/open/stored_view.h"
#include "engine/read/stored_inputs.h"
#include "engine/write/provider.h"

namespace torch_ckpt {

// Things are tensors, whole, in row-major order.
class StoredTensors final : public Provider {
 public:
  // Finds a tensor by its number, in any thread.
  using Finder = std::function<Result<StoredViewPtr>(uint32_t number)>;

  StoredTensors(StoredInputs* inputs, Finder find)
      : inputs_(inputs), find_(std::move(find)) {}

  uint64_t ScratchBytes() const override { return kFetchScratch; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  StoredInputs* const inputs_;
  const Finder find_;
};

// Things are files.
class StoredFiles final : public Provider {
 public:
  explicit StoredFiles(StoredInputs* inputs) : inputs_(inputs) {}

  uint64_t ScratchBytes() const override { return kFetchScratch; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  StoredInputs* const inputs_;
};

}  // namespace torch_ckpt
