#include "engine/save/save_job.h"

#include <set>
#include <string_view>
#include <utility>

#include "engine/commit/commit.h"
#include "engine/save/assemble_job.h"
#include "engine/save/final_files.h"

namespace torch_ckpt {
namespace {

Result<std::vector<FinalTensor>> FinalTensorsOf(
    const std::vector<WriteTensor>& tensors) {
  std::vector<FinalTensor> finals;
  finals.reserve(tensors.size());
  std::set<std::string_view> names;
  for (const WriteTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return InvalidArgument("is there twice").WithTensor(tensor.name);
    }
    TC_RETURN_IF_ERROR(CheckTensorName(tensor.name));
    finals.push_back({tensor.name,
                      tensor.stored.value_or(tensor.dtype),
                      tensor.global_shape,
                      {}});
  }
  return finals;
}

}  // namespace

Result<SavedCheckpoint> RunSaveJob(SavePlan plan,
                                   const std::vector<SourceTensor>& sources,
                                   Job* job) {
  TC_ASSIGN_OR_RETURN(const std::vector<FinalTensor> finals,
                      FinalTensorsOf(plan.tensors));
  TC_RETURN_IF_ERROR(WaitForDevices(sources));
  TC_ASSIGN_OR_RETURN(SaveSession session,
                      BeginSave(plan.path, plan.overwrite));
  TC_ASSIGN_OR_RETURN(const FinalFiles list,
                      StageFinalFiles(session.directory(), finals, plan.rule,
                                      plan.naming, plan.options.sync));
  TC_RETURN_IF_ERROR(session.CheckNotHidden(NewFilesOf(list)));
  CommitRequest commit;
  for (const WriteTensor& tensor : plan.tensors) {
    commit.planned.emplace_back(tensor.name, "");
  }
  WritePlan write;
  write.staging = session.place().path;
  write.final_tensors = std::move(plan.tensors);
  write.options = plan.options;
  TC_ASSIGN_OR_RETURN(WrittenPlan written,
                      RunWriteJob(std::move(write), sources, job));
  RankFinals rank;
  rank.files = std::move(written.final_files);
  if (written.spill) rank.spills.push_back(*std::move(written.spill));
  TC_ASSIGN_OR_RETURN(
      commit.files, RunAssembleJob(session.directory(), list, {std::move(rank)},
                                   plan.options, job));
  commit.index_name = list.index_name;
  TC_ASSIGN_OR_RETURN(Manifest manifest, CommitSave(&session, commit));
  return SavedCheckpoint{std::move(manifest), session.TakeWarnings()};
}

}  // namespace torch_ckpt
