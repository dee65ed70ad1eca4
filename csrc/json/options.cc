#include "json/options.h"

#include <algorithm>

namespace torch_ckpt {

int WorkersOf(const Json& object) {
  const auto workers = GetInt(object, "workers", kDefaultWorkers);
  if (!workers.ok()) return kDefaultWorkers;
  return static_cast<int>(std::clamp<int64_t>(*workers, 1, kMaxWorkers));
}

OutputOptions OutputOptionsOf(const Json& object) {
  OutputOptions options;
  options.workers = WorkersOf(object);
  options.sync = GetBool(object, "sync", true);
  options.direct_io = GetBool(object, "direct_io", true);
  return options;
}

Result<std::string> SubdirectoryIn(const Json& object) {
  const auto field = object.find("subdirectory");
  if (field == object.end() || field->is_null()) return std::string();
  TC_ASSIGN_OR_RETURN(std::string name, GetString(object, "subdirectory"));
  if (!name.empty()) TC_RETURN_IF_ERROR(CheckFileName(name));
  return name;
}

Result<FileNaming> FileNamingOf(const Json& object) {
  FileNaming naming;
  TC_ASSIGN_OR_RETURN(naming.stem, GetString(object, "stem"));
  naming.number_single = GetBool(object, "number_single", true);
  naming.has_index = GetBool(object, "has_index", true);
  TC_ASSIGN_OR_RETURN(naming.subdirectory, SubdirectoryIn(object));
  return naming;
}

Result<FileRule> FileRuleOf(const Json& object) {
  FileRule rule;
  TC_ASSIGN_OR_RETURN(const int64_t max_bytes, GetInt(object, "max_bytes", 0));
  if (max_bytes < 0) return InvalidArgument("'max_bytes' is negative");
  rule.max_bytes = static_cast<uint64_t>(max_bytes);
  const auto mapping = object.find("mapping");
  if (mapping == object.end() || !mapping->is_object()) return rule;
  rule.mapping.emplace();
  for (const auto& [name, index] : mapping->items()) {
    if (!index.is_number_integer()) {
      return InvalidArgument("the mapping holds file indices").WithTensor(name);
    }
    rule.mapping->emplace_back(name, index.get<int64_t>());
  }
  return rule;
}

}  // namespace torch_ckpt
