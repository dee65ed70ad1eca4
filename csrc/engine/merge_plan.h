// What a merge makes of a checkpoint: its output files, and where each byte of
// these comes from.
//
// Coverage was proved when the checkpoint was opened: a tensor is there, whole,
// or the plan cannot be made.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/output_files.h"
#include "format/names.h"
#include "plan/divide.h"

namespace torch_ckpt {

struct MergeOptions {
  FileRule files;
  FileNaming naming;
  // fqn and the dtype of its output, where that is another than the input's.
  std::map<std::string, Dtype, std::less<>> dtypes;
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
  // A stretch of an output: header text, a tensor, or bytes of an input file.
  struct Extent {
    uint64_t begin = 0, end = 0;
    enum { kHeader, kTensor, kFile } kind = kHeader;
    uint32_t index = 0;         // catalog entry or catalog file
    uint64_t from = 0;          // of that file's bytes
    std::optional<Dtype> cast;  // of a tensor
  };
  struct Layout {
    std::string header;
    std::vector<Extent> extents;  // ascending
  };

  // `ids`: one for each output file, or empty to make new ones.
  static Result<MergePlan> Make(std::shared_ptr<const Checkpoint> checkpoint,
                                MergeOptions options,
                                std::vector<std::string> ids);
  // One that fills, of each of `outputs`, what its extents cover.
  static MergePlan OfExtents(std::shared_ptr<const Checkpoint> checkpoint,
                             MergeOptions options,
                             std::vector<OutputSpec> outputs,
                             std::vector<Layout> layouts);

  const std::vector<OutputSpec>& outputs() const { return outputs_; }
  // Of the index beside them; empty where there is none.
  const std::string& index_name() const { return index_name_; }
  // What the output holds: entries of the checkpoint's catalog. An alias that
  // the mapping names is a tensor of its own there.
  const std::vector<uint32_t>& entries() const { return entries_; }
  // Those that are aliases there, too.
  const std::vector<uint32_t>& aliases() const { return aliases_; }
  const MergeOptions& options() const { return options_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }

 private:
  friend class Merger;
  std::shared_ptr<const Checkpoint> checkpoint_;
  MergeOptions options_;
  std::vector<OutputSpec> outputs_;
  std::string index_name_;
  std::vector<uint32_t> entries_, aliases_;
  std::vector<Layout> layouts_;
};

// The files of the input's manifest that stay where the output goes into the
// input's own directory: shards (as with stock), what is no tensor, and what
// holds tensors that the output lacks. Earlier final files go.
Result<std::vector<std::string>> KeptInPlace(const MergePlan& plan);

}  // namespace torch_ckpt
