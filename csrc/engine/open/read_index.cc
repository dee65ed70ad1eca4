#include "engine/open/read_index.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "engine/open/not_weights.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMostListed = 5;

}  // namespace

Result<HfIndex> ReadIndex(const Directory& directory, const std::string& name,
                          std::string_view suffix) {
  TC_ASSIGN_OR_RETURN(const std::string text,
                      directory.ReadFile(name, kMaxIndexBytes));
  Result<HfIndex> parsed = ParseHfIndex(AsBytes(text), suffix);
  if (parsed.ok()) return parsed;
  const Result<File> file = directory.OpenFile(name, {});
  if (file.ok()) TC_RETURN_IF_ERROR(CheckNoStandIn(*file));
  return parsed.status().WithFile(directory.Join(name));
}

Result<IndexedFiles> FilesOf(const HfIndex& index, const Directory& directory,
                             std::span<const std::string> names) {
  std::set<std::string_view> wanted;
  // The hint is that a file most often follows the one before it.
  for (const auto& each : index.weight_map) {
    wanted.insert(wanted.end(), each.second);
  }
  IndexedFiles out;
  out.all.assign(wanted.begin(), wanted.end());
  for (const std::string& name : out.all) {
    if (name.find('/') == name.npos) {
      if (!std::binary_search(names.begin(), names.end(), name)) {
        out.missing.push_back(name);
      }
      continue;
    }
    const auto info = directory.StatName(name);
    if (info.status().sys_errno() == ENOTDIR) {
      return Corrupt(
                 "is named by the index, and leads through a symbolic link or "
                 "a file, which is not followed: put the files themselves "
                 "there, or give the path of the directory that is meant")
          .WithFile(directory.Join(name));
    }
    TC_RETURN_IF_ERROR(info.status());
    if (!*info) out.missing.push_back(name);
  }
  return out;
}

void NoteAbsent(const HfIndex& index, const std::string& index_name,
                const std::function<bool(const std::string& name)>& has,
                std::vector<std::string>* notes) {
  std::vector<std::string> absent;
  for (const auto& each : index.weight_map) {
    if (!has(each.first)) absent.push_back(each.first);
  }
  if (absent.empty()) return;
  notes->push_back("has " + index_name +
                   ", which names what no file of it has: " + Listed(absent));
}

std::string Listed(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kMostListed); ++i) {
    out += (i > 0 ? ", " : "") + names[i];
  }
  if (names.size() > kMostListed) {
    out += " and " + std::to_string(names.size() - kMostListed) + " more";
  }
  return out;
}

}  // namespace torch_ckpt
