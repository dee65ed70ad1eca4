// A file in a staging directory.
#pragma once

#include <string>
#include <utility>

#include "format/names.h"
#include "format/ours/manifest.h"

namespace torch_ckpt {

// What a checkpoint will say of the file, and where it is until then. Its
// digests are known when it is written; `id` is empty for files that carry
// none.
struct StagedFile : ManifestFile {
  std::string staged{};  // name in staging; `name` is the final one
};

// One that is to be written.
inline StagedFile ToBeStaged(std::string name, std::string id, FileRole role,
                             uint64_t bytes) {
  std::string staged = StagedName(name, id);
  return {{std::move(name), std::move(id), role, bytes, {}}, std::move(staged)};
}

}  // namespace torch_ckpt
