// Stored tensors and files, as the bytes of outputs.
#pragma once

#include <functional>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/write/provider.h"
#include "engine/write/stored_inputs.h"
#include "format/catalog.h"

namespace torch_ckpt {

// A tensor, and where it is in the files.
struct StoredTensor {
  CatalogEntry entry;
  std::vector<Placement> placements;  // the owners among these tile it
  // That these are in, where CRC-32s of such are known.
  std::vector<DigestedRange> storages = {};
};

// An entry of a checkpoint. Errors are those of Checkpoint::Placements.
Result<StoredTensor> FindStoredTensor(const Checkpoint& checkpoint,
                                      uint32_t entry);

// Things are tensors, whole, in row-major order.
class StoredTensors final : public Provider {
 public:
  // Finds a tensor by its number, in any thread.
  using Finder = std::function<Result<StoredTensor>(uint32_t number)>;

  StoredTensors(StoredInputs* inputs, Finder find)
      : inputs_(inputs), find_(std::move(find)) {}

  uint64_t ScratchBytes() const override { return StoredInputs::kScratchBytes; }
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

  uint64_t ScratchBytes() const override { return StoredInputs::kScratchBytes; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  StoredInputs* const inputs_;
};

}  // namespace torch_ckpt
