// The read job: boxes of a checkpoint into memory of this process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/read/stored_inputs.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// Memory to be filled. `strides` are bytes per element step. The caller keeps
// it alive and lets nobody else write it until the job has returned.
struct TargetTensor {
  std::byte* data = nullptr;
  Dims sizes;
  Dims strides;
  int64_t element_bytes = 1;
  // If set, the dtype of the elements, to which stored ones are cast where
  // theirs is another. Else bytes are taken as they are.
  std::optional<Dtype> cast_to{};
};

// Either a box of a tensor or, with `file` set, the whole of a file of the
// manifest into a one-dimensional target of bytes.
struct ReadItem {
  std::string name;  // fqn
  Box box;           // in elements of the stored dtype
  std::string file;
  size_t target = 0;
  // Other processes of this machine read these bytes as well, about now.
  bool shared = false;
};

struct ReadPlan {
  std::vector<ReadItem> items;
  int workers = 2;
  // Compare every segment that is touched with its CRC-32C; of archives, every
  // storage that is read as a whole with its CRC-32. Safetensors of others have
  // nothing to compare.
  bool verify = true;
  bool direct_io = true;  // large ranges past the page cache, where that goes
  // Whether other processes of this machine read the same checkpoint. Then what
  // must be read beside what is wanted is taken for what they want: columns of
  // a row, segments with edges of several shards. It comes from storage once,
  // as items that are shared do, and from the page cache for all the others.
  bool neighbours = false;
};

struct ReadReport {
  uint64_t bytes_needed = 0;
  uint64_t bytes_read = 0;  // these two by all calls that share inputs
  uint64_t bytes_verified = 0;
};

// First proves that every element of every box is in the checkpoint and that
// targets fit, before a byte is copied; then reads each file in ascending
// order with bounded memory. A cast that loses values (values/cast.h) is
// kInvalidArgument. After an error targets may be partly filled. Who reads in
// several calls gives `shared` ones, of Wholes::kAtOnce, and has them Check at
// the end: what one call reads of a storage is compared by none.
Result<ReadReport> RunReadJob(std::shared_ptr<const Checkpoint> checkpoint,
                              const ReadPlan& plan,
                              const std::vector<TargetTensor>& targets,
                              Job* job, StoredInputs* shared = nullptr);

}  // namespace torch_ckpt
