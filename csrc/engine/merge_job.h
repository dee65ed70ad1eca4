// The merge job: a checkpoint's tensors, whole, into final files.
//
// Headers are parsed once, coverage is proved when the checkpoint is opened,
// and the output is streamed: a piece of an output file is gathered from the
// input files, digested and written. Memory: two pieces a worker. The bytes
// that are read are compared with their digests before the job is done.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/output_files.h"

namespace torch_ckpt {

struct MergeOptions {
  // fqn and index of its output file, from 1. None: all into one file.
  std::optional<std::vector<std::pair<std::string, int64_t>>> mapping;
  // A tensor without an index, or an index for no tensor, is an error; with
  // false such tensors are left out and such indices ignored.
  bool strict = true;
  bool verify = true;
  OutputOptions output;
};

// What every rank of a distributed merge must agree on. Deterministic in the
// checkpoint, the options and the file ids.
class MergePlan {
 public:
  // `ids`: one for each output file, or empty to make new ones.
  static Result<MergePlan> Make(std::shared_ptr<const Checkpoint> checkpoint,
                                MergeOptions options,
                                std::vector<std::string> ids);

  const std::vector<OutputSpec>& outputs() const { return outputs_; }
  // What the output holds: entries of the checkpoint's catalog.
  const std::vector<uint32_t>& entries() const { return entries_; }
  const MergeOptions& options() const { return options_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }

 private:
  friend class Merger;
  // A stretch of an output: header text, a tensor, or (copy) an input file.
  struct Extent {
    uint64_t begin = 0, end = 0;
    enum { kHeader, kTensor, kFile } kind = kHeader;
    uint32_t index = 0;  // catalog entry or catalog file
  };
  struct Layout {
    std::string header;
    std::vector<Extent> extents;
  };
  std::shared_ptr<const Checkpoint> checkpoint_;
  MergeOptions options_;
  std::vector<OutputSpec> outputs_;
  std::vector<uint32_t> entries_;
  std::vector<Layout> layouts_;
};

// Writes the pieces of `range` into staging; see WriteOutputs for `existing`
// and the result. kCorrupt names an input file whose bytes do not match.
Result<std::vector<std::vector<uint32_t>>> RunMergeJob(const MergePlan& plan,
                                                       const Directory& staging,
                                                       bool existing,
                                                       PieceRange range,
                                                       Job* job);

}  // namespace torch_ckpt
