// Options that several requests have.
#pragma once

#include "engine/write/output_files.h"
#include "format/names.h"
#include "json/fields.h"
#include "plan/divide.h"

namespace torch_ckpt {

// Of "workers": how many threads a job has, from 1 to kMaxWorkers.
inline constexpr int kDefaultWorkers = 4;
inline constexpr int kMaxWorkers = 256;
int WorkersOf(const Json& object);
// Of "workers", "sync" and "direct_io".
OutputOptions OutputOptionsOf(const Json& object);
// Of "subdirectory", a plain name; empty where it is absent: the checkpoint's
// own directory.
Result<std::string> SubdirectoryIn(const Json& object);
// Of "stem", "number_single", "has_index" and "subdirectory".
Result<FileNaming> FileNamingOf(const Json& object);
// Of "mapping", fqn to index of its file, or "max_bytes"; one file without
// them.
Result<FileRule> FileRuleOf(const Json& object);

}  // namespace torch_ckpt
