// Final files in staging, before their tensors are there.
//
// The coordinator lays the files out, creates them at full size and writes
// their headers before any rank writes a byte of them: the staged header is the
// plan. Every rank reads it, compares it with what it has in memory, and writes
// its boxes where the header says they belong (engine/save/final_write.h).
// What the ranks could not write by themselves the coordinator puts in place
// when all are done (engine/save/assemble_job.h). A list in staging tells the
// ranks which files there are.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/box.h"
#include "engine/commit/previous.h"
#include "engine/open/header_io.h"
#include "engine/write/output_files.h"
#include "format/names.h"
#include "plan/divide.h"

namespace torch_ckpt {

// A final file on paper.
struct FinalLayout {
  StagedFile file;
  std::string header;                     // all before the data
  std::vector<SafetensorsEntry> tensors;  // in the order of their data
  std::vector<uint32_t> order;  // position of each in the list that was given
};

// `tensors` (begin and end ignored) in the order of docs/format.md.
Result<FinalLayout> LayOutFinalFile(const std::string& name,
                                    const std::string& id,
                                    std::vector<SafetensorsEntry> tensors);

// Rows of a tensor, along its first dimension, whose boxes are so narrow in the
// file that their owners do not write them there: the ranks of a ring hand them
// to one that does, or the coordinator gathers them.
struct FinalBand {
  int64_t ring = -1;  // index of the ring, if any
  int64_t begin = 0;
  int64_t end = 0;
};

struct FinalTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Dims shape;
  std::vector<FinalBand> bands;  // ascending, apart, each of another ring
};

// Ranks of one node, which have all boxes of the ring's bands.
struct FinalRing {
  int64_t leader = 0;            // who writes
  std::vector<int64_t> senders;  // the others, ascending
};

// A tensor of the final files, by number: of its file, and of its entry in the
// header there.
struct FinalPlace {
  uint32_t file = 0;
  uint32_t entry = 0;
  auto operator<=>(const FinalPlace&) const = default;
};

struct FinalFiles {
  std::vector<StagedFile> files;
  std::string index_name;  // of the index beside them, if any
  struct Banded {
    FinalPlace tensor;
    std::vector<FinalBand> bands;  // as a FinalTensor's
  };
  std::vector<Banded> banded;  // by tensor, ascending
  std::vector<FinalRing> rings;

  // The band that the box lies in; null for a box that its owner writes.
  // kConflict, without the tensor's name, where it lies in one with a part of
  // its rows.
  Result<const FinalBand*> BandOf(FinalPlace tensor, const Box& box) const;
};

// What is to stand in the directory of the save, for CheckNotHidden.
NewFiles NewFilesOf(const FinalFiles& list);

// The rows of a band as a tensor: its place is where the band's bytes are.
Result<SafetensorsEntry> EntryOf(const SafetensorsEntry& tensor,
                                 const FinalBand& band);
// A box of the tensor in that one.
Box InBand(Box box, const FinalBand& band);

// What the ranks of a ring write, as tensors, in the order of the files and of
// their data.
struct RingTensor {
  FinalPlace of;
  SafetensorsEntry entry;
};
Result<std::vector<RingTensor>> RingTensorsOf(
    const FinalFiles& list, const std::vector<FileHeader>& headers,
    const FinalRing& ring);

// Coordinator: divides the tensors into files by `rule`, creates these and
// writes their headers, durably if `sync`, and then the list. kInvalidArgument
// names a tensor that the mapping lacks. What an error leaves goes with the
// staging directory.
Result<FinalFiles> StageFinalFiles(const Directory& staging,
                                   const std::vector<FinalTensor>& tensors,
                                   const FileRule& rule,
                                   const FileNaming& naming, bool sync,
                                   std::vector<FinalRing> rings = {});

// The list. kIncomplete where the coordinator has left none.
Result<FinalFiles> ReadFinalFiles(const Directory& staging);
// Whether it is there: not once the coordinator has given the save up.
bool HasFinalFiles(const Directory& staging);

}  // namespace torch_ckpt
