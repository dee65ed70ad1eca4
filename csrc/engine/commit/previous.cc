#include "engine/commit/previous.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "engine/open/checkpoint.h"
#include "engine/open/header_io.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/read_index.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

// What readers look for by the stems of the new files.
std::set<std::string> NamesLookedFor(const NewFiles& files) {
  std::set<std::string, std::less<>> stems;
  const auto all_stems = [&] {
    for (const std::string_view stem : kFinalStems) stems.emplace(stem);
  };
  if (files.shard_ranks > 0) all_stems();
  for (std::string_view name : files.names) {
    if (!name.ends_with(kDataSuffix)) continue;
    if (IsShardName(name)) {
      all_stems();
    } else if (const auto numbered = ParseNumberedName(name)) {
      stems.emplace(numbered->stem);
    } else {
      stems.emplace(name.substr(0, name.size() - kDataSuffix.size()));
    }
  }
  std::set<std::string> names;
  for (const std::string& stem : stems) {
    names.insert(stem + std::string(kDataSuffix));
    names.insert(stem + std::string(kIndexSuffix));
  }
  return names;
}

// Whether a shard that is there stays beside new ones, and is none of them.
bool IsStrayShard(const std::string& name, const NewFiles& files) {
  if (files.shard_ranks > 0) {
    const auto rank = RankOfShard(name);
    return rank && *rank >= files.shard_ranks;
  }
  return IsShardName(name) &&
         std::any_of(files.names.begin(), files.names.end(), IsShardName);
}

// What the manifests say; kCorrupt, naming it, for one that is damaged.
Result<Previous> ReadManifests(const Directory& target) {
  const std::string name(kManifestName);
  Previous previous;
  Result<std::string> text = target.ReadFile(name, kMaxManifestBytes);
  if (text.ok()) {
    Result<Manifest> parsed = ParseManifest(AsBytes(*text));
    if (!parsed.ok()) return parsed.status().WithFile(target.Join(name));
    previous.manifest = true;
    previous.files = std::move(parsed->files);
  } else if (text.status().sys_errno() != ENOENT) {
    return text.status();
  }
  TC_ASSIGN_OR_RETURN(std::vector<Manifest> parts, ReadParts(target));
  std::set<std::string> seen;
  for (const ManifestFile& file : previous.files) seen.insert(file.name);
  for (Manifest& part : parts) {
    previous.part_manifests.push_back(
        PartManifestName(part.part->rank, part.part->world_size));
    for (ManifestFile& file : part.files) {
      if (!seen.insert(file.name).second) continue;
      previous.files.push_back(std::move(file));
    }
  }
  return previous;
}

// Whether readers look for a data file by its name alone.
bool IsLookedFor(std::string_view name) {
  const auto numbered = ParseNumberedName(name);
  const std::string_view stem =
      numbered ? numbered->stem
               : name.substr(0, name.size() - kDataSuffix.size());
  return std::find(kFinalStems.begin(), kFinalStems.end(), stem) !=
         kFinalStems.end();
}

// The final files of the save whose manifest, `text`, is damaged: those that
// have an id of ours and the name that the text still says of it; where it says
// nothing of the id, those that are called so that they hide what comes. What
// somebody has copied to another name is not taken for one. With them goes the
// index of nothing else.
void AddFinalFiles(const Directory& target,
                   const std::vector<std::string>& names, std::string_view text,
                   std::vector<ManifestFile>* files) {
  std::set<std::string> ours;
  for (const std::string& name : names) {
    if (!name.ends_with(kDataSuffix) || IsShardName(name)) continue;
    const std::string id = PeekFileIdOf(target, name, {.no_follow = true});
    if (id.empty()) continue;
    const bool told = text.find(id) != text.npos;
    if (told ? text.find('"' + name + '"') == text.npos : !IsLookedFor(name)) {
      continue;
    }
    files->emplace_back().name = name;
    ours.insert(name);
  }
  for (const std::string& name : names) {
    if (!name.ends_with(kIndexSuffix) || ours.empty()) continue;
    const Result<HfIndex> index = ReadIndex(target, name);
    if (!index.ok()) continue;
    const Result<IndexedFiles> named = FilesOf(*index, target, names);
    if (!named.ok()) continue;
    bool any = false, only = true;
    for (const std::string& file : named->all) {
      any = any || ours.contains(file);
      only = only && (ours.contains(file) ||
                      std::binary_search(named->missing.begin(),
                                         named->missing.end(), file));
    }
    if (any && only) files->emplace_back().name = name;
  }
}

}  // namespace

Result<Previous> ReadPrevious(const Directory& target) {
  Result<Previous> previous = ReadManifests(target);
  if (previous.status().kind() != ErrorKind::kCorrupt) return previous;
  Previous guessed;
  guessed.damage = previous.status();
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  for (const std::string& name : names) {
    if (name == kManifestName) {
      guessed.manifest = true;
    } else if (IsPartManifestName(name)) {
      guessed.part_manifests.push_back(name);
    } else if (name == kCatalogName || RankOfFile(name)) {
      guessed.files.emplace_back().name = name;
    }
  }
  const Result<std::string> text =
      target.ReadFile(std::string(kManifestName), kMaxManifestBytes);
  AddFinalFiles(target, names, text.ok() ? std::string_view(*text) : "",
                &guessed.files);
  return guessed;
}

Status CheckNotHidden(const Directory& target, const Previous& previous,
                      const NewFiles& files) {
  const std::set<std::string> looked_for = NamesLookedFor(files);
  if (looked_for.empty()) return {};
  std::set<std::string> gone(files.names.begin(), files.names.end());
  const std::set<std::string> keep(files.keep.begin(), files.keep.end());
  for (const ManifestFile& file : previous.files) {
    if (!keep.contains(file.name)) gone.insert(file.name);
  }
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, target.List());
  for (const std::string& name : names) {
    if (gone.contains(name)) continue;
    if (keep.contains(name) && IsShardName(name)) continue;
    const bool hides = looked_for.contains(name);
    if (!hides && !IsStrayShard(name, files)) continue;
    const std::string whose = keep.contains(name)
                                  ? "holds tensors that are left out"
                                  : "is of no save of torch_ckpt";
    return Conflict(
               whose + ", and " +
               (hides ? "transformers would read it instead of"
                      : "stock's reader would add it to") +
               " what is saved beside it: remove it first, save into another "
               "directory, or into a file of this name")
        .WithFile(target.Join(name));
  }
  return {};
}

}  // namespace torch_ckpt
