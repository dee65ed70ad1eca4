// What Directory does with the directories below it.
#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "os/directory.h"
#include "os/names.h"

namespace torch_ckpt {

using internal::CheckName;
using internal::Steps;

namespace {

// What lies below each directory that the paths lead through.
std::map<std::string, std::vector<std::string>> Below(
    const std::vector<std::string>& paths) {
  std::map<std::string, std::vector<std::string>> below;
  for (const std::string& path : paths) {
    Steps steps(path);
    if (steps.deep()) below[steps.first].push_back(std::move(steps.rest));
  }
  return below;
}

}  // namespace

Status Directory::MakeParents(const std::vector<std::string>& paths) const {
  for (const auto& [name, rest] : Below(paths)) {
    Result<Directory> inner = OpenDirectory(name);
    if (inner.status().sys_errno() == ENOENT) {
      const Status made = MakeDirectory(name);
      // EEXIST: another thread or node has made it.
      if (!made.ok() && made.sys_errno() != EEXIST) return made;
      inner = OpenDirectory(name);
    }
    TC_RETURN_IF_ERROR(inner.ok() ? inner->MakeParents(rest) : inner.status());
  }
  return {};
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
  for (const auto& [name, rest] : Below(paths)) {
    const Result<Directory> inner = OpenDirectory(name);
    if (inner.status().sys_errno() == ENOENT) continue;
    TC_RETURN_IF_ERROR(inner.status());
    TC_RETURN_IF_ERROR(inner->SyncParents(rest));
    TC_RETURN_IF_ERROR(inner->Sync());
  }
  return {};
}

Status Directory::RemoveTree(const std::string& name,
                             const ForEach& for_each) const {
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
  // One that cannot go keeps no other.
  std::mutex mutex;
  first = Status();
  Status each = for_each(names->size(), [&](size_t i) -> Status {
    Status removed = inner->RemoveTree((*names)[i]);
    const std::lock_guard lock(mutex);
    if (first.ok()) first = std::move(removed);
    return {};
  });
  if (first.ok()) first = std::move(each);
  Status removed = RemoveDirectory(name, /*missing_ok=*/true);
  return first.ok() ? removed : first;
}

Status Directory::InTurn(size_t count,
                         const std::function<Status(size_t)>& step) {
  for (size_t i = 0; i < count; ++i) TC_RETURN_IF_ERROR(step(i));
  return {};
}

}  // namespace torch_ckpt
