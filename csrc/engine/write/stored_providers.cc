#include "engine/write/stored_providers.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

// Reads the runs, whose dst counts in the buffer, file by file; sorts both.
Status ReadInto(StoredInputs* inputs, std::vector<StoredRun>* runs,
                std::vector<DigestedRange>* storages, MutableByteSpan scratch,
                FillBuffer* buffer) {
  std::sort(runs->begin(), runs->end(),
            [](const StoredRun& a, const StoredRun& b) {
              return a.file != b.file ? a.file < b.file : a.run.src < b.run.src;
            });
  SortRanges(storages);
  const auto begin = reinterpret_cast<uint64_t>(buffer->Out(0, 0).data());
  DigestedOutput output{begin - buffer->offset()};
  std::vector<ReadRun> of_file;
  for (auto run = runs->begin(); run != runs->end();) {
    const uint32_t file = run->file;
    for (of_file.clear(); run != runs->end() && run->file == file; ++run) {
      of_file.push_back({run->run, nullptr});
      of_file.back().run.dst += begin;
    }
    const WantedRuns wanted{file, of_file, *storages, false, false, &output};
    TC_ASSIGN_OR_RETURN(const uint64_t bytes,
                        inputs->Read(buffer->worker(), wanted, scratch));
    buffer->Filled(bytes);
  }
  for (const DigestedOutput::Row& row : output.rows) {
    buffer->Made(row.dst - begin, row.bytes, row.crc32c);
  }
  return {};
}

}  // namespace

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
  return ReadInto(inputs_, &runs, &storages, scratch, buffer);
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
  std::vector<DigestedRange> none;
  return ReadInto(inputs_, &runs, &none, scratch, buffer);
}

}  // namespace torch_ckpt
