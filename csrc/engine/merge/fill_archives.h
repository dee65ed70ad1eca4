// Archives that torch.save has laid out without elements, filled with those of
// another checkpoint and put into place.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/commit/foreign_target.h"
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

// Writes the files of `layout`, which lies in the session's kLayoutName, anew:
// their own bytes, but where they say that a tensor is, the elements of that
// tensor of `source`, cast where the dtypes differ; and the CRC-32 of every
// entry that has none. Streams, as a merge does. When all is synced and every
// archive says what was written, they are put into place: CommitForeign, at
// which the session ends. kIncomplete names a tensor that either lacks,
// kInvalidArgument one of another shape, or of which a cast loses a value;
// after an error the session holds files of no use.
Status FillArchives(const std::shared_ptr<const Checkpoint>& source,
                    const std::shared_ptr<const Checkpoint>& layout,
                    const FillOptions& options, const ForeignTarget& target,
                    SaveSession* session, Job* job);

}  // namespace torch_ckpt
