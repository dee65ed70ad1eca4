// What stands in a directory that is saved into: what is ours there by a
// manifest, and what of others would be read instead of what comes.
#pragma once

#include <string>
#include <vector>

#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// What stands in T now by our manifests, those of parts included.
struct Previous {
  std::vector<ManifestFile> files;  // every name once
  bool manifest = false;            // whether there is one of the whole
  std::vector<std::string> part_manifests;
  // Why the manifests say nothing, where one is damaged: then `files` has what
  // is called as only files of our saves are, the final files that have an
  // id of ours, and their index; in subdirectories what the text still says.
  Status damage;
};
// A manifest of a newer version is kUnsupported: it may name what we know
// nothing of.
Result<Previous> ReadPrevious(const Directory& target);

// The data files and the index of what is to stand in T, or below it.
struct NewFiles {
  std::vector<std::string> names;
  // Of names that are not known yet: shards of so many ranks, in this
  // subdirectory.
  int64_t shard_ranks = 0;
  std::string shards_in = {};
  // Of the previous files, those that stay.
  std::vector<std::string> keep = {};
};

// kConflict, naming it, for a file that would be read instead of the new ones
// in its directory: transformers takes "<stem>.safetensors" before an index of
// that stem, and readers of both go by an index where there is one; beside
// shards those of all stems, and shards that stock's reader would add. A file
// of `previous` that does not stay is none. The same for what stands where a
// subdirectory is to be and is none, and for a checkpoint that stands in one.
Status CheckNotHidden(const Directory& target, const Previous& previous,
                      const NewFiles& files);

}  // namespace torch_ckpt
