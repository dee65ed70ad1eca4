#include "engine/commit/previous.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "engine/open/checkpoint.h"
#include "engine/open/header_io.h"
#include "engine/open/rank_manifests.h"
#include "engine/open/read_index.h"
#include "format/names.h"

namespace torch_ckpt {
namespace {

// What is to stand in one directory, by the names there.
struct NamesThere {
  std::vector<std::string> names;  // that are new
  int64_t shard_ranks = 0;         // NewFiles'
  std::set<std::string> going;     // of the previous ones
  std::set<std::string> keep;
};

// What readers look for by the stems of the new files.
std::set<std::string> NamesLookedFor(const NamesThere& files) {
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
bool IsStrayShard(const std::string& name, const NamesThere& files) {
  if (files.shard_ranks > 0) {
    const auto rank = RankOfShard(name);
    return rank && *rank >= files.shard_ranks;
  }
  return IsShardName(name) &&
         std::any_of(files.names.begin(), files.names.end(), IsShardName);
}

// By subdirectory: those that there will be new files in.
std::map<std::string, NamesThere> ByDirectory(const Previous& previous,
                                              const NewFiles& files) {
  std::map<std::string, NamesThere> out;
  const auto at = [&](const std::string& path) {
    return out.find(std::string(SubdirectoryOf(path)));
  };
  for (const std::string& path : files.names) {
    out[std::string(SubdirectoryOf(path))].names.emplace_back(FileNameOf(path));
  }
  if (files.shard_ranks > 0) {
    out[files.shards_in].shard_ranks = files.shard_ranks;
  }
  const std::set<std::string> keep(files.keep.begin(), files.keep.end());
  for (const std::string& path : keep) {
    if (at(path) != out.end()) at(path)->second.keep.emplace(FileNameOf(path));
  }
  for (const ManifestFile& file : previous.files) {
    if (keep.contains(file.name) || at(file.name) == out.end()) continue;
    at(file.name)->second.going.emplace(FileNameOf(file.name));
  }
  return out;
}

Result<Directory> OpenBelow(const Directory& directory, std::string_view path) {
  const size_t slash = path.find('/');
  Result<Directory> inner =
      directory.OpenDirectory(std::string(path.substr(0, slash)));
  if (!inner.ok() || slash == path.npos) return inner;
  return OpenBelow(*inner, path.substr(slash + 1));
}

// What would make a subdirectory a checkpoint of its own, which readers of it
// find first.
Status CheckNoOther(const Directory& below) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, below.List());
  for (const std::string& name : names) {
    if (name != kManifestName && name != kStageSuffix &&
        !IsPartManifestName(name) && !RankOfPartStage(name) &&
        !IsStockMetadataName(name)) {
      continue;
    }
    return Conflict(
               "is of another checkpoint, in a subdirectory that is to hold a "
               "part of this one: remove that first, or save into another "
               "directory")
        .WithFile(below.Join(name));
  }
  return {};
}

Status CheckNotHiddenIn(const Directory& directory, const NamesThere& files) {
  const std::set<std::string> looked_for = NamesLookedFor(files);
  if (looked_for.empty()) return {};
  const std::set<std::string> fresh(files.names.begin(), files.names.end());
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory.List());
  for (const std::string& name : names) {
    if (fresh.contains(name) || files.going.contains(name)) continue;
    const bool kept = files.keep.contains(name);
    if (kept && IsShardName(name)) continue;
    const bool hides = looked_for.contains(name);
    if (!hides && !IsStrayShard(name, files)) continue;
    const std::string whose = kept ? "holds tensors that are left out"
                                   : "is of no save of torch_ckpt";
    return Conflict(
               whose + ", and " +
               (hides ? "transformers would read it instead of"
                      : "stock's reader would add it to") +
               " what is saved beside it: remove it first, save into another "
               "directory, or into a file of this name")
        .WithFile(directory.Join(name));
  }
  return {};
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

// The files in subdirectories whose paths such a text still says.
void AddFilesBelow(const Directory& target,
                   const std::vector<std::string>& names, std::string_view text,
                   std::vector<ManifestFile>* files) {
  for (const std::string& name : names) {
    if (text.find('"' + name + '/') == text.npos) continue;
    const Result<Directory> below = target.OpenDirectory(name);
    if (!below.ok()) continue;
    const Result<std::vector<std::string>> inner = below->List();
    if (!inner.ok()) continue;
    for (const std::string& each : *inner) {
      std::string path = PathIn(name, each);
      if (text.find('"' + path + '"') == text.npos) continue;
      files->emplace_back().name = std::move(path);
    }
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
  const std::string_view said = text.ok() ? std::string_view(*text) : "";
  AddFinalFiles(target, names, said, &guessed.files);
  AddFilesBelow(target, names, said, &guessed.files);
  return guessed;
}

Status CheckNotHidden(const Directory& target, const Previous& previous,
                      const NewFiles& files) {
  for (const auto& [name, there] : ByDirectory(previous, files)) {
    if (name.empty()) {
      TC_RETURN_IF_ERROR(CheckNotHiddenIn(target, there));
      continue;
    }
    const Result<Directory> below = OpenBelow(target, name);
    if (below.status().sys_errno() == ENOENT) continue;
    if (below.status().sys_errno() == ENOTDIR) {
      TC_RETURN_IF_ERROR(target.CheckReplaceable(PathIn(name, kIndexName)));
    }
    TC_RETURN_IF_ERROR(below.status());
    TC_RETURN_IF_ERROR(CheckNoOther(*below));
    TC_RETURN_IF_ERROR(CheckNotHiddenIn(*below, there));
  }
  return {};
}

}  // namespace torch_ckpt
