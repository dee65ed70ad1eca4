// A data file of one rank, before it is written.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/save/final_write.h"
#include "engine/write/joined_boxes.h"
#include "engine/write/literals.h"
#include "engine/write/memory_providers.h"
#include "format/safetensors/short_header.h"

namespace torch_ckpt {

// Ok where the tensor has a source that is as large as its box, and the box is
// in the tensor. Names it else.
Status CheckSource(const WriteTensor& tensor,
                   const std::vector<SourceTensor>& sources);

// The file's header, parsed and as text, and where its bytes come from.
struct DataLayout {
  FileHeader parsed;
  std::string_view header;
  ExtentList extents;
};

// The file `id` of `tensors`, whose names it takes away. Those of one name are
// boxes of one tensor, and one entry: where they tile a box it is that, else
// they are packed (format/safetensors/sharding_info.h). No bytes are copied for
// it. `joined` and `texts` get what the extents refer to; without `joined`
// boxes stay apart whatever they make. kInvalidArgument for what CheckSource
// refuses, and for boxes that disagree about their tensor, kConflict for boxes
// that overlap.
Result<DataLayout> LayOutData(std::vector<WriteTensor>* tensors,
                              const std::string& id,
                              const std::vector<SourceTensor>& sources,
                              MemorySources* memory, JoinedBoxes* joined,
                              Texts* texts);

}  // namespace torch_ckpt
