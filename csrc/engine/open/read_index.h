// The index of a directory of others, and what it says that is not so.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/safetensors/hf_index.h"
#include "os/directory.h"

namespace torch_ckpt {

// Errors name the file.
Result<HfIndex> ReadIndex(const Directory& directory, const std::string& name,
                          std::string_view suffix = kDataSuffix);

// The files that an index names, sorted, each once; and those of them that
// `directory`, which has `names`, does not have. Below it they are looked for.
struct IndexedFiles {
  std::vector<std::string> all, missing;
};
Result<IndexedFiles> FilesOf(const HfIndex& index, const Directory& directory,
                             std::span<const std::string> names);

// Adds a note where the index names tensors that no file has, which are as good
// as absent.
void NoteAbsent(const HfIndex& index, const std::string& index_name,
                const std::function<bool(const std::string& name)>& has,
                std::vector<std::string>* notes);

// "a, b, c and 7 more".
std::string Listed(const std::vector<std::string>& names);

}  // namespace torch_ckpt
