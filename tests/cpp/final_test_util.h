// Saves by simulated ranks into final files.
#pragma once

#include <atomic>

#include "engine/save/assemble_job.h"
#include "engine_test_util.h"

namespace torch_ckpt {

struct FinalSettings {
  FileRule files;
  std::vector<std::string> gathered;
  FileNaming naming;
  OutputOptions output;
  // Beside the final files: shards, as SaveAll writes them.
  std::vector<Piece> shards;
  SaveSettings of_shards;
};

// The tensors of all pieces, by first appearance.
std::vector<FinalTensor> FinalTensorsOf(
    const std::vector<Piece>& pieces,
    const std::vector<std::string>& gathered = {});

// One rank's part of a save into final files that are staged.
Result<RankFinals> WriteFinalRank(const std::string& staging, int64_t rank,
                                  const std::vector<Piece>& pieces,
                                  const OutputOptions& options = {},
                                  std::atomic<uint64_t>* by_ring = {});

// A save whose ranks write into final files.
Result<Manifest> SaveFinal(const std::string& target,
                           const std::vector<Piece>& pieces,
                           const FinalSettings& settings = {});

}  // namespace torch_ckpt
