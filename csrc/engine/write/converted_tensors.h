// The tensors of a checkpoint, in any dtype that they can be made of.
#pragma once

#include <memory>

#include "engine/open/checkpoint.h"
#include "engine/read/stored_inputs.h"
#include "engine/write/casts.h"
#include "engine/write/made_tensors.h"
#include "engine/write/stored_providers.h"

namespace torch_ckpt {

// The dtype of an entry where nobody wants another: of codes with scales that
// of values/scaled.h.
Dtype UsualDtype(const Checkpoint& checkpoint, uint32_t entry);
// kInvalidArgument, naming it, where its elements are not made `dtype`.
Status CheckConverts(const Checkpoint& checkpoint, uint32_t entry, Dtype dtype);

class ConvertedTensors {
 public:
  // `inputs` is of the checkpoint's files, and outlives this.
  ConvertedTensors(std::shared_ptr<const Checkpoint> checkpoint,
                   StoredInputs* inputs);

  // An entry, whole, in row-major order. Called before anybody fills. REQUIRES:
  // CheckConverts.
  Origin Find(uint32_t entry, Dtype dtype);
  // When all is filled: kInvalidArgument names a tensor of which a value was
  // lost (values/cast.h).
  Status Check() const;

 private:
  const std::shared_ptr<const Checkpoint> checkpoint_;
  StoredTensors tensors_;
  Casts casts_;
  MadeTensors made_;
};

}  // namespace torch_ckpt
