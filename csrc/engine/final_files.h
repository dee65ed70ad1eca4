// Final files in staging, before their tensors are there.
//
// The coordinator lays the files out, creates them at full size and writes
// their headers before any rank writes a byte of them: the staged header is the
// plan. Every rank reads it, compares it with what it has in memory, and writes
// its boxes where the header says they belong (engine/final_write.h). What the
// ranks could not write by themselves the coordinator puts in place when all
// are done (engine/assemble_job.h). A list in staging tells the ranks which
// files there are.
#pragma once

#include <string>
#include <vector>

#include "engine/header_io.h"
#include "engine/output_files.h"
#include "format/names.h"
#include "plan/divide.h"

namespace torch_ckpt {

// A final file on paper.
struct FinalLayout {
  OutputSpec spec;
  std::string header;                     // all before the data
  std::vector<SafetensorsEntry> tensors;  // in the order of their data
  std::vector<uint32_t> order;  // position of each in the list that was given
};

// `tensors` (begin and end ignored) in the order of docs/format.md.
Result<FinalLayout> LayOutFinalFile(const std::string& name,
                                    const std::string& id,
                                    std::vector<SafetensorsEntry> tensors);

struct FinalTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Dims shape;
  // Its boxes are too narrow in the file for their owners to write them there:
  // the ranks of a ring hand them to one that does, or the coordinator gathers
  // them.
  bool gathered = false;
  int64_t ring = -1;  // of a gathered tensor: index of the ring, if any
};

// Ranks of one node, which have all boxes of the ring's tensors.
struct FinalRing {
  int64_t leader = 0;            // who writes
  std::vector<int64_t> senders;  // the others, ascending
};

struct FinalFile {
  std::string name;    // final name
  std::string staged;  // name in staging
  std::string id;
  uint64_t bytes = 0;
};

struct FinalFiles {
  std::vector<FinalFile> files;
  std::string index_name;  // of the index beside them, if any
  struct Gathered {
    std::string name;
    int64_t ring = -1;
  };
  std::vector<Gathered> gathered;  // by name
  std::vector<FinalRing> rings;

  // Null for tensors whose boxes their owners write.
  const Gathered* FindGathered(std::string_view name) const;
  // Null where there is none.
  const FinalRing* RingOf(std::string_view tensor) const;
};

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
