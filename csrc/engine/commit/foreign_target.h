// Checkpoints in a format of others, of which no manifest says what belongs to
// them: a file of torch.save, a directory of stock DCP or Megatron's. They are
// staged as a first save is (staging.h), but beside T whatever stands there,
// and take its place by one rename:
//
//   a directory   <place>/<save id> itself, onto nothing or an empty directory;
//   a file        out of that directory, onto nothing or, where it may be
//                 replaced, over a file of its kind.
//
// Crash argument: what is renamed was synced before, and until then T is as it
// was. Two nodes whose file system keeps locks to each node: a directory is
// superseded by a rename of the same name, of which the server does one first.
// A file is whole whoever renames it, and the later one replaces the earlier
// one's only where it was told to.
#pragma once

#include <string>
#include <string_view>

#include "engine/commit/staging.h"

namespace torch_ckpt {

struct ForeignTarget {
  std::string path;
  bool is_file = false;    // of torch.save; else a directory of .distcp files
  bool overwrite = false;  // of a file: replaces one of torch.save
};

// An empty directory in what is staged, for what is made on the way.
inline constexpr std::string_view kLayoutName = "layout";

// Begins the save. kConflict for what stands at the target and is not to be
// replaced, before anything is made; else as BeginSave.
Result<SaveSession> BeginForeign(const ForeignTarget& target);

// Puts into place what was staged: of a file the one called `staged`, of a
// directory all that is there but kLayoutName. All files were synced. kConflict
// where something has come to stand at the target, or another save has
// superseded this one. The session ends on success.
Status CommitForeign(SaveSession* session, const ForeignTarget& target,
                     const std::string& staged);

}  // namespace torch_ckpt
