// What Directory does with the directories below it.
#include <cerrno>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "os/directory.h"
#include "os/names.h"

namespace torch_ckpt {

using internal::CheckName;
using internal::Steps;

Status Directory::MakeParents(const std::string& path) const {
  const Steps steps(path);
  if (!steps.deep()) return {};
  Result<Directory> inner = OpenDirectory(steps.first);
  if (inner.status().sys_errno() == ENOENT) {
    TC_RETURN_IF_ERROR(MakeDirectory(steps.first));
    inner = OpenDirectory(steps.first);
  }
  return inner.ok() ? inner->MakeParents(steps.rest) : inner.status();
}

Status Directory::RemoveEmptyParents(const std::string& path) const {
  const Steps steps(path);
  if (!steps.deep()) return {};
  {
    const Result<Directory> inner = OpenDirectory(steps.first);
    if (!inner.ok()) {
      return inner.status().sys_errno() == ENOENT ? Status() : inner.status();
    }
    TC_RETURN_IF_ERROR(inner->RemoveEmptyParents(steps.rest));
  }
  (void)RemoveDirectory(steps.first, /*missing_ok=*/true);
  return {};
}

Status Directory::SyncParents(const std::vector<std::string>& paths) const {
  std::map<std::string, std::vector<std::string>> below;
  for (const std::string& path : paths) {
    Steps steps(path);
    if (steps.deep()) below[steps.first].push_back(std::move(steps.rest));
  }
  for (const auto& [name, rest] : below) {
    const Result<Directory> inner = OpenDirectory(name);
    if (inner.status().sys_errno() == ENOENT) continue;
    TC_RETURN_IF_ERROR(inner.status());
    TC_RETURN_IF_ERROR(inner->SyncParents(rest));
    TC_RETURN_IF_ERROR(inner->Sync());
  }
  return {};
}

Status Directory::RemoveTree(const std::string& name) const {
  TC_RETURN_IF_ERROR(CheckName(*this, name));
  // Not a look and then a step: what is no directory, a link too, goes so.
  Status first = Unlink(name, /*missing_ok=*/true);
  if (first.sys_errno() != EISDIR && first.sys_errno() != EPERM) return first;
  const Result<Directory> inner = OpenDirectory(name);
  if (inner.status().sys_errno() == ENOENT) return {};  // others remove it too
  if (!inner.ok()) {
    return inner.status().sys_errno() == ENOTDIR ? first : inner.status();
  }
  const Result<std::vector<std::string>> names = inner->List();
  if (names.status().sys_errno() == ENOENT) return {};
  TC_RETURN_IF_ERROR(names.status());
  first = Status();
  for (const std::string& entry : *names) {
    Status removed = inner->RemoveTree(entry);
    if (first.ok()) first = std::move(removed);
  }
  Status removed = RemoveDirectory(name, /*missing_ok=*/true);
  return first.ok() ? removed : first;
}

}  // namespace torch_ckpt
