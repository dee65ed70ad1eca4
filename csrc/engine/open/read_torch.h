// Files of torch.save: one that is named, or the weights of a Hub directory.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/open/catalog_reader.h"

namespace torch_ckpt {

// Whether any of `names`, which are sorted, is a file of weights as the Hub
// calls them: pytorch_model.bin, pytorch_model-00001-of-00002.bin, and the same
// of adapter_model and diffusion_pytorch_model.
bool HasTorchWeights(std::span<const std::string> names);
// The same, or an index names files below the directory that are there.
Result<bool> IsTorchWeights(const Directory& directory,
                            std::span<const std::string> names);
// Whether it is what the Hub calls the index of such files.
bool IsTorchIndex(std::string_view name);
std::vector<std::string> TorchWeights(std::span<const std::string> names);

// Of several files an index says which count, where there is one; without it
// all files "-of-N" must be there (kIncomplete), and files of two stems are
// kConflict. A file that was asked for is read, whatever its name is. Where in
// the files the tensors are is in the catalog; the leaves that are no tensors
// are objects. Refused in clear words: files of torch before 1.6, TorchScript,
// pickles without an archive.
Result<ForeignCatalog> ReadTorchFiles(const Directory& directory,
                                      std::span<const std::string> names,
                                      bool is_file);

}  // namespace torch_ckpt
