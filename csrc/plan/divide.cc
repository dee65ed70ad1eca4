#include "plan/divide.h"

#include <algorithm>
#include <unordered_map>

namespace torch_ckpt {

Result<FileDivision> DivideIntoFiles(std::span<const std::string_view> names,
                                     std::span<const uint64_t> bytes,
                                     const FileRule& rule) {
  FileDivision division;
  division.index.reserve(names.size());
  if (rule.mapping) {
    std::unordered_map<std::string_view, int64_t> wanted;
    for (const auto& [name, index] : *rule.mapping) {
      if (index < 1 || index > kMaxFileIndex) {
        return InvalidArgument("maps to file " + std::to_string(index) +
                               "; indices are 1 to " +
                               std::to_string(kMaxFileIndex))
            .WithTensor(name);
      }
      wanted.emplace(name, index);
      division.count = std::max(division.count, index);
    }
    for (const std::string_view name : names) {
      const auto it = wanted.find(name);
      division.index.push_back(it == wanted.end() ? 0 : it->second);
    }
    return division;
  }
  uint64_t in_file = 0;
  bool has_any = false;
  for (size_t i = 0; i < names.size(); ++i) {
    if (rule.max_bytes > 0 && has_any &&
        (in_file > rule.max_bytes || bytes[i] > rule.max_bytes - in_file)) {
      ++division.count;
      in_file = 0;
    }
    in_file += bytes[i];
    has_any = true;
    division.index.push_back(division.count);
  }
  if (division.count > kMaxFileIndex) {
    return InvalidArgument("files of " + std::to_string(rule.max_bytes) +
                           " bytes would be " + std::to_string(division.count) +
                           "; at most " + std::to_string(kMaxFileIndex) +
                           " have names");
  }
  return division;
}

}  // namespace torch_ckpt
