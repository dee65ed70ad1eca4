// Archives that torch.save has laid out without elements, filled with those of
// another checkpoint.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/open/checkpoint.h"
#include "engine/write/output_files.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

struct FillOptions {
  // Tensors of the layout, and those of the source that they are. What the
  // layout has beside them stays as it is.
  std::map<std::string, std::string, std::less<>> tensors;
  bool verify = true;  // compare what is read with its digests
  OutputOptions output;
};

// Writes the files of `layout` anew, under their names in the empty directory
// `out`: their own bytes, but where they say that a tensor is, the elements of
// that tensor of `source`, cast where the dtypes differ; and the
// CRC-32 of every entry that has none. Streams, as a merge does. All is synced
// when this returns. kIncomplete names a tensor that either lacks,
// kInvalidArgument one of another shape, or of which a cast loses a value;
// after an error `out` holds files of no use.
Status FillArchives(const std::shared_ptr<const Checkpoint>& source,
                    const std::shared_ptr<const Checkpoint>& layout,
                    const Directory& out, const FillOptions& options, Job* job);

}  // namespace torch_ckpt
