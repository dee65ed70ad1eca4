#include "os/trial_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>
#include <vector>

#include "os/random.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kPrefix = ".torch_ckpt-doctor-";
constexpr size_t kDigits = 16;

std::string NewName() {
  std::array<std::byte, kDigits / 2> id;
  FillRandom(id);
  std::string name(kPrefix);
  AppendHex(&name, id);
  return name;
}

bool IsName(std::string_view name) {
  return name.size() == kPrefix.size() + kDigits && name.starts_with(kPrefix) &&
         name.find_first_not_of(kHexDigits, kPrefix.size()) == name.npos;
}

// With what is in it.
Status RemoveLocked(DirectoryLock* lock) {
  TC_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      lock->directory().List());
  for (const std::string& name : names) {
    if (name == kLockFileName) continue;
    TC_RETURN_IF_ERROR(lock->directory().RemoveTree(name));
  }
  return lock->Remove();
}

// A link of that name leads to what may be anybody's.
bool IsOwnEntry(const Directory& parent, const std::string& name,
                const Directory& opened) {
  const auto entry = parent.StatEntry(name);
  const auto info = opened.Stat();
  return entry.ok() && *entry && info.ok() && (*entry)->SameFile(*info);
}

void RemoveDead(const Directory& parent) {
  const auto names = parent.List();
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!IsName(name)) continue;
    const auto entry = parent.StatEntry(name);
    if (!entry.ok() || !*entry || !(*entry)->is_directory) continue;
    auto lock = DirectoryLock::Acquire(parent.Join(name));
    if (!lock.ok() || !IsOwnEntry(parent, name, lock->directory())) continue;
    // What stays is in the way of nobody, and the next trials meet it again.
    (void)RemoveLocked(&*lock);
  }
}

// What a lock fails with where somebody has begun to remove the directory.
bool IsBeingRemoved(const Status& status) {
  return status.kind() == ErrorKind::kConflict ||
         status.sys_errno() == ENOENT || status.sys_errno() == ESTALE;
}

}  // namespace

Result<TrialDirectory> TrialDirectory::Make(const Directory& parent) {
  RemoveDead(parent);
  constexpr int kAttempts = 5;
  for (int attempt = 1;; ++attempt) {
    std::string name = NewName();
    TC_RETURN_IF_ERROR(parent.MakeDirectory(name));
    Result<DirectoryLock> lock = DirectoryLock::Acquire(parent.Join(name));
    if (attempt < kAttempts && IsBeingRemoved(lock.status())) continue;
    Result<Directory> own = parent.OpenDirectory(name);
    if (own.ok()) {
      return TrialDirectory(parent, std::move(name), std::move(*own),
                            std::move(lock));
    }
    if (lock.ok()) lock->Release();
    (void)parent.RemoveTree(name);
    return own.status();
  }
}

Status TrialDirectory::Remove() {
  return lock_.ok() ? RemoveLocked(&*lock_) : parent_->RemoveTree(name_);
}

}  // namespace torch_ckpt
