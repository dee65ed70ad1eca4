// Whole tensors through bounded memory, for who computes something of them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/read/stored_inputs.h"
#include "runtime/arena.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

struct StreamOptions {
  int workers = 2;
  bool verify = true;  // as in ReadPlan
  bool direct_io = true;
  // Bytes of memory at most, those of the workers included, of which each reads
  // through its own: kExhausted for less than they take.
  uint64_t memory = uint64_t{64} << 20;
};

// Reads the same tensors of one checkpoint or of several. Not for several
// threads.
class TensorStream {
 public:
  // Elements of a tensor that follow each other, row-major, in each of the
  // checkpoints: a whole number of units of the dtypes.
  struct Stretch {
    size_t tensor = 0;  // position among the names
    size_t elements = 0;
    std::vector<const std::byte*> bytes;
  };

  // `job` outlives it. kIncomplete and kInvalidArgument name the tensor that a
  // checkpoint does not have, or not in the shape of the first.
  static Result<TensorStream> Open(
      std::vector<std::shared_ptr<const Checkpoint>> checkpoints,
      const std::vector<std::string>& names, const StreamOptions& options,
      Job* job);

  // The stretches that come next, small enough that threads share them evenly;
  // none at the end. They are there until the next call. After an error, which
  // is one of RunReadJob, there are no more.
  Result<std::span<const Stretch>> Next();

  // In checkpoint `c`.
  Dtype dtype(size_t tensor, size_t c) const {
    return tensors_[tensor].dtypes[c];
  }

 private:
  struct Tensor {
    std::string name;
    Dims shape;
    std::vector<Dtype> dtypes;
  };
  // What is read at once of a tensor, and where in the buffer it goes.
  struct BufferedBox {
    size_t tensor = 0;
    Box box;
    std::vector<std::byte*> bytes;
  };

  TensorStream(std::vector<std::shared_ptr<const Checkpoint>> checkpoints,
               const StreamOptions& options, Job* job)
      : checkpoints_(std::move(checkpoints)), options_(options), job_(job) {}

  Status AddTensor(const std::string& name);
  Status LeaseMemory();
  // Of a box of a tensor in the buffer, all checkpoints together.
  uint64_t Taken(size_t tensor, const Box& box) const;
  void Cut(size_t tensor, const Box& box);
  Result<std::vector<BufferedBox>> TakeBoxes();
  Status Read(const std::vector<BufferedBox>& boxes, size_t c);
  void Divide(const std::vector<BufferedBox>& boxes);

  std::vector<std::shared_ptr<const Checkpoint>> checkpoints_;
  StreamOptions options_;
  Job* job_;
  std::vector<Tensor> tensors_;
  // By checkpoint. The files stay open from one read to the next.
  std::vector<std::unique_ptr<StoredInputs>> inputs_;
  ArenaLease buffer_;
  size_t next_ = 0;         // tensor that is not cut yet
  std::vector<Box> boxes_;  // of the one before, the next one last
  std::vector<Stretch> stretches_;
};

}  // namespace torch_ckpt
