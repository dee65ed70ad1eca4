#include "final_test_util.h"

#include <algorithm>
#include <set>

namespace torch_ckpt {

std::vector<FinalTensor> FinalTensorsOf(
    const std::vector<Piece>& pieces,
    const std::vector<std::string>& gathered) {
  std::vector<FinalTensor> tensors;
  std::set<std::string> seen;
  for (const Piece& piece : pieces) {
    if (!seen.insert(piece.name).second) continue;
    const Array& array = *piece.array;
    FinalTensor& tensor = tensors.emplace_back(
        FinalTensor{piece.name, array.dtype, array.shape, {}});
    if (std::find(gathered.begin(), gathered.end(), piece.name) !=
            gathered.end() &&
        array.shape[0] > 0) {
      tensor.bands.push_back({-1, 0, array.shape[0]});
    }
  }
  return tensors;
}

Result<RankFinals> WriteFinalRank(const std::string& staging, int64_t rank,
                                  const std::vector<Piece>& pieces,
                                  const OutputOptions& options,
                                  std::atomic<uint64_t>* by_ring) {
  RankWork work;
  work.plan.staging = staging;
  work.plan.rank = rank;
  work.plan.options = options;
  for (const Piece& piece : pieces) {
    if (piece.rank != rank) continue;
    work.memory.push_back(BoxBytes(*piece.array, piece.box));
    work.plan.final_tensors.push_back(
        {piece.name, piece.array->dtype, piece.box.sizes, piece.box.offsets,
         piece.array->shape, work.memory.size() - 1});
  }
  for (const std::string& bytes : work.memory) {
    work.sources.push_back(BytesSource(bytes));
  }
  Job job;
  TC_ASSIGN_OR_RETURN(WrittenPlan written,
                      RunWriteJob(work.plan, work.sources, &job));
  if (by_ring) *by_ring += written.ring_bytes;
  RankFinals finals;
  finals.rank = rank;
  finals.files = std::move(written.final_files);
  if (written.spill) finals.spills.push_back(std::move(*written.spill));
  return finals;
}

Result<Manifest> SaveFinal(const std::string& target,
                           const std::vector<Piece>& pieces,
                           const FinalSettings& settings) {
  TC_ASSIGN_OR_RETURN(SaveSession session, BeginSave(target, true));
  TC_ASSIGN_OR_RETURN(
      const FinalFiles list,
      StageFinalFiles(session.directory(),
                      FinalTensorsOf(pieces, settings.gathered), settings.files,
                      settings.naming, settings.output.sync));
  int64_t world_size = 1;
  for (const Piece& piece : pieces) {
    world_size = std::max(world_size, piece.rank + 1);
  }
  std::vector<RankFinals> ranks;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    TC_ASSIGN_OR_RETURN(
        RankFinals finals,
        WriteFinalRank(session.place().path, rank, pieces, settings.output));
    ranks.push_back(std::move(finals));
  }
  Job job;
  CommitRequest request;
  if (!settings.shards.empty()) {
    TC_RETURN_IF_ERROR(WriteRanks(session.place().path, settings.shards,
                                  settings.of_shards, &request));
  }
  TC_ASSIGN_OR_RETURN(
      const std::vector<StagedFile> finals,
      RunAssembleJob(session.directory(), list, ranks, settings.output, &job));
  request.files.insert(request.files.end(), finals.begin(), finals.end());
  request.world_size = world_size;
  request.index_name = list.index_name;
  return CommitSave(&session, request);
}

}  // namespace torch_ckpt
