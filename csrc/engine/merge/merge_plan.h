// What a merge makes of a checkpoint: its output files, and where each byte of
// these comes from.
//
// Coverage was proved when the checkpoint was opened: a tensor is there, whole,
// or the plan cannot be made.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/open/checkpoint.h"
#include "engine/write/converted_tensors.h"
#include "engine/write/literals.h"
#include "engine/write/output_files.h"
#include "engine/write/stored_providers.h"
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
  bool objects = true;  // leaves that are no tensors go along
  // The checkpoint is one Without some entries: what its files hold of these
  // does not go along.
  bool cut = false;
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
  const std::vector<Output>& outputs() const { return outputs_; }
  // Of the index beside them; empty where there is none.
  const std::string& index_name() const { return index_name_; }
  // What the output holds: entries of the checkpoint's catalog. An alias that
  // the mapping names is a tensor of its own there.
  const std::vector<uint32_t>& entries() const { return entries_; }
  // Those that are aliases there, too.
  const std::vector<uint32_t>& aliases() const { return aliases_; }
  // The output that holds one of the entries that are objects.
  std::string ObjectsFile(const CatalogEntry& object) const;
  const MergeOptions& options() const { return options_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }

  // What the outputs read. Their files open when they are read.
  StoredInputs* inputs() const { return &sources_->inputs; }
  // Whether no value was lost in a cast; when all is written.
  Status CheckCasts() const { return sources_->tensors.Check(); }

 private:
  // The providers of the outputs.
  struct Sources {
    Sources(const std::shared_ptr<const Checkpoint>& checkpoint,
            const MergeOptions& options);

    StoredInputs inputs;
    ConvertedTensors tensors;
    StoredFiles files;
    Texts headers;
  };

  MergePlan(std::shared_ptr<const Checkpoint> checkpoint, MergeOptions options);

  Status AddFile(std::string name, std::string id,
                 const std::vector<uint32_t>& members);
  void AddObjects(uint32_t file, const std::string& id);
  void AddText(std::string name, std::string text, const std::string& id);
  Status AddCutObjects(const std::function<std::string()>& take_id);
  Status AddArchived(const std::string& id);
  Status AddObjectFiles(const std::function<std::string()>& take_id);
  void KeepLeaves();

  std::shared_ptr<const Checkpoint> checkpoint_;
  MergeOptions options_;
  std::unique_ptr<Sources> sources_;
  std::vector<Output> outputs_;
  std::string index_name_;
  std::vector<uint32_t> entries_, aliases_;
};

}  // namespace torch_ckpt
