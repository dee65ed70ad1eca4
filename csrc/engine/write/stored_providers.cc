#include "engine/write/stored_providers.h"

namespace torch_ckpt {

Status StoredTensors::Fill(const std::vector<Stretch>& stretches,
                           MutableByteSpan scratch, FillBuffer* buffer) {
  std::vector<StoredRun> runs;
  std::vector<DigestedRange> storages;
  for (const Stretch& stretch : stretches) {
    TC_ASSIGN_OR_RETURN(const StoredViewPtr tensor,
                        find_(static_cast<uint32_t>(stretch.index)));
    TC_RETURN_IF_ERROR(tensor->RunsOfBytes(stretch.from,
                                           stretch.from + stretch.bytes,
                                           stretch.at, &runs, &storages));
  }
  inputs_->Expect(buffer->worker(), storages);
  return inputs_->Read(&runs, scratch, buffer);
}

Status StoredFiles::Fill(const std::vector<Stretch>& stretches,
                         MutableByteSpan scratch, FillBuffer* buffer) {
  std::vector<StoredRun> runs;
  for (const Stretch& stretch : stretches) {
    Run run;
    run.src = stretch.from;
    run.dst = stretch.at;
    run.bytes = stretch.bytes;
    runs.push_back({static_cast<uint32_t>(stretch.index), run});
  }
  return inputs_->Read(&runs, scratch, buffer);
}

}  // namespace torch_ckpt
