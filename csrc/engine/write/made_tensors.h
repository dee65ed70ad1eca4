// Tensors that are made of stored ones: numbers of codes and scales, parts of
// others.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/read/stored_inputs.h"
#include "engine/write/provider.h"

namespace torch_ckpt {

// Things are tensors, whole, in row-major order. What is read of them is what a
// read job would read (engine/read/item_reads.h), of each stretch by itself.
class MadeTensors final : public Provider {
 public:
  // `inputs` is of the checkpoint's files, and outlives this.
  MadeTensors(std::shared_ptr<const Checkpoint> checkpoint,
              StoredInputs* inputs)
      : checkpoint_(std::move(checkpoint)), inputs_(inputs) {}

  // An entry in a dtype of whole bytes. Called before anybody fills.
  Origin Add(uint32_t entry, Dtype dtype);

  // When all is filled: kInvalidArgument names a tensor of which a value was
  // lost (values/cast.h).
  Status Check() const;

  uint64_t ScratchBytes() const override { return kFetchScratch; }
  Status Fill(const std::vector<Stretch>& stretches, MutableByteSpan scratch,
              FillBuffer* buffer) override;

 private:
  struct Thing {
    uint32_t entry;
    Dtype dtype;
  };

  const std::shared_ptr<const Checkpoint> checkpoint_;
  StoredInputs* const inputs_;
  std::vector<Thing> things_;
  mutable std::mutex mutex_;  // guards lost_
  Status lost_;
};

}  // namespace torch_ckpt
