#include "engine/open/numbered_files.h"

#include <map>
#include <set>
#include <utility>

#include "format/names.h"

namespace torch_ckpt {

Status CheckNumbers(std::span<const std::string> names,
                    std::string_view suffix) {
  struct Group {
    std::set<int64_t> indices;
    std::string_view example;
  };
  std::map<std::pair<std::string_view, int64_t>, Group> groups;
  for (const std::string& name : names) {
    const auto numbered = ParseNumberedName(name, suffix);
    if (!numbered) continue;
    Group& group = groups[{numbered->stem, numbered->count}];
    group.indices.insert(numbered->index);
    group.example = name;
  }
  for (const auto& [key, group] : groups) {
    if (static_cast<int64_t>(group.indices.size()) == key.second) continue;
    int64_t missing = 1;
    while (group.indices.contains(missing)) ++missing;
    return Incomplete("file " + std::to_string(missing) + " of " +
                      std::to_string(key.second) + " is missing beside " +
                      std::string(group.example));
  }
  return {};
}

}  // namespace torch_ckpt
