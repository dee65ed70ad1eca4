#include "os/lock.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <optional>
#include <sstream>
#include <utility>

#include "os/call.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMaxLockFile = 4096;

// The first bytes of a file of /proc, which has no size to stat; empty
// when it cannot be read.
std::string ReadProc(const std::string& path) {
  auto directory = Directory::Open(ParentPath(path));
  if (!directory.ok()) return {};
  auto file = directory->OpenFile(BaseName(path), {});
  if (!file.ok()) return {};
  std::array<char, 4096> buffer;
  const ssize_t got = internal::TransferCall(
      "pread", path, {buffer.data(), buffer.size(), 0},
      [&](size_t count) { return pread(file->fd(), buffer.data(), count, 0); });
  return got <= 0 ? std::string()
                  : std::string(buffer.data(), static_cast<size_t>(got));
}

// Who holds a lock file. Every part is one word; "-" where it is not known.
struct Holder {
  std::string host, boot, pid_space, pid, start;

  std::string ToText() const {
    return host + "\n" + boot + "\n" + pid_space + "\n" + pid + "\n" + start +
           "\n";
  }
  std::string Name() const { return "process " + pid + " on host " + host; }
};

std::string Word(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (char& c : text) {
    if (c <= ' ' || c > '~') c = '?';
  }
  return text.empty() ? "-" : text;
}

// When the process began, in ticks since the boot: field 22, counted behind
// the command, which may hold any character.
std::string StartTime(const std::string& pid) {
  const std::string stat = ReadProc("/proc/" + pid + "/stat");
  const size_t paren = stat.rfind(')');
  if (paren == std::string::npos) return "-";
  std::istringstream rest(stat.substr(paren + 1));
  std::string word;
  for (int field = 3; field <= 22; ++field) {
    if (!(rest >> word)) return "-";
  }
  return word;
}

Holder Self() {
  Holder self;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  self.host = Word(host.data());
  self.boot = Word(ReadProc("/proc/sys/kernel/random/boot_id"));
  struct stat space;
  // Two containers of one host may share its name, but not their process ids.
  const char* const kSpace = "/proc/self/ns/pid";
  const bool known = internal::SystemCall("fstatat", kSpace, [&] {
                       return fstatat(AT_FDCWD, kSpace, &space, 0);
                     }) == 0;
  self.pid_space = known ? std::to_string(space.st_ino) : "-";
  self.pid = std::to_string(getpid());
  self.start = StartTime(self.pid);
  return self;
}

std::optional<Holder> ParseHolder(const std::string& text) {
  // A file cut short by a crash must not pass as a whole one.
  if (text.empty() || text.back() != '\n') return std::nullopt;
  std::istringstream in(text);
  Holder holder;
  if (!(in >> holder.host >> holder.boot >> holder.pid_space >> holder.pid >>
        holder.start)) {
    return std::nullopt;
  }
  return holder;
}

// True only on proof. Doubt means alive: a lock too many is an error that
// somebody can clear up, a lock too few is a damaged checkpoint.
bool ProvablyDead(const Holder& holder, const Holder& self) {
  if (holder.host != self.host || self.host == "-" ||
      self.host.starts_with("localhost")) {
    return false;
  }
  if (holder.boot == "-" || self.boot == "-") return false;
  if (holder.boot != self.boot) return true;
  if (holder.pid_space != self.pid_space || self.pid_space == "-") return false;
  int pid = 0;
  const char* end = holder.pid.data() + holder.pid.size();
  const auto parsed = std::from_chars(holder.pid.data(), end, pid);
  if (parsed.ec != std::errc() || parsed.ptr != end || pid <= 0) return false;
  if (kill(pid, 0) != 0) return errno == ESRCH;
  const std::string start = StartTime(holder.pid);
  return start != "-" && holder.start != "-" && start != holder.start;
}

Status HeldBy(const std::string& who, const std::string& path) {
  return Conflict("another save holds the lock of this directory" + who)
      .WithFile(path);
}

// Takes a dead holder's file away. Renamed first and looked at again: of two
// processes that found the same dead lock the slower one would otherwise
// delete the lock that the faster one has made since.
Status RemoveStale(const Directory& directory, const std::string& stale) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string aside = std::string(kLockFileName) + ".stale-" +
                            std::to_string(getpid()) + "-" +
                            std::to_string(now);
  Status moved = directory.Rename(kLockFileName, directory, aside);
  if (!moved.ok()) {
    if (moved.sys_errno() != ENOENT) return moved;
    return HeldBy(" (it was taken over just now)", directory.path());
  }
  auto text = directory.ReadFile(aside, kMaxLockFile);
  if (text.ok() && *text == stale) {
    return directory.Unlink(aside, /*missing_ok=*/true);
  }
  TC_RETURN_IF_ERROR(
      directory.RenameNoReplace(aside, directory, kLockFileName));
  return HeldBy(" (it was taken over just now)", directory.path());
}

Status TakeLockFile(const Directory& directory) {
  const Holder self = Self();
  // The second round follows a stale lock; a third one would be a fight.
  for (int round = 0; round < 2; ++round) {
    Status made = directory.WriteFile(kLockFileName, self.ToText());
    if (made.sys_errno() != EEXIST) return made;
    auto text = directory.ReadFile(kLockFileName, kMaxLockFile);
    if (!text.ok()) {
      if (text.status().sys_errno() == ENOENT) continue;  // just released
      return text.status();
    }
    const auto holder = ParseHolder(*text);
    if (!holder) {
      return HeldBy("; its file '" + std::string(kLockFileName) +
                        "' does not say who; remove it if no save is running",
                    directory.path());
    }
    if (!ProvablyDead(*holder, self)) {
      return HeldBy(": " + holder->Name() + "; remove the file '" +
                        std::string(kLockFileName) +
                        "' if that one does not run any more",
                    directory.path());
    }
    TC_RETURN_IF_ERROR(RemoveStale(directory, *text));
  }
  return HeldBy("", directory.path());
}

// What says "no flock here": NFS and cluster file systems mounted without
// lock support. NFS gives EBADF where it wants a descriptor open for writing,
// which a directory's cannot be.
bool FlockUnsupported(int error) {
  return error == EOPNOTSUPP || error == ENOSYS || error == ENOLCK ||
         error == EINVAL || error == EBADF;
}

// The holder of a lock removes or renames its directory when it is done: a
// lock on what `path` no longer names protects nothing.
Status CheckStillThere(const Directory& directory) {
  TC_ASSIGN_OR_RETURN(const FileInfo locked, directory.Stat());
  auto again = Directory::Open(directory.path());
  if (again.ok()) {
    TC_ASSIGN_OR_RETURN(const FileInfo now, again->Stat());
    if (now.SameFile(locked)) return {};
  } else if (again.status().sys_errno() != ENOENT) {
    return again.status();
  }
  return Conflict("was removed or replaced while it was being locked")
      .WithFile(directory.path());
}

}  // namespace

DirectoryLock::DirectoryLock(DirectoryLock&& o) noexcept
    : directory_(std::exchange(o.directory_, Directory())),
      by_file_(std::exchange(o.by_file_, false)),
      owner_(std::exchange(o.owner_, 0)) {}

DirectoryLock& DirectoryLock::operator=(DirectoryLock&& o) noexcept {
  if (this != &o) {
    Release();
    directory_ = std::exchange(o.directory_, Directory());
    by_file_ = std::exchange(o.by_file_, false);
    owner_ = std::exchange(o.owner_, 0);
  }
  return *this;
}

DirectoryLock::~DirectoryLock() { Release(); }

Result<DirectoryLock> DirectoryLock::Acquire(const std::string& path) {
  TC_ASSIGN_OR_RETURN(Directory directory, Directory::Open(path));
  DirectoryLock lock;
  if (internal::SystemCall("flock", path, [&] {
        return flock(directory.fd(), LOCK_EX | LOCK_NB);
      }) != 0) {
    const int error = errno;
    if (error == EWOULDBLOCK) return HeldBy("", path);
    if (!FlockUnsupported(error)) return Status::Io(error, "flock", path);
    TC_RETURN_IF_ERROR(TakeLockFile(directory));
    lock.by_file_ = true;
  }
  lock.directory_ = std::move(directory);
  lock.owner_ = getpid();
  TC_RETURN_IF_ERROR(CheckStillThere(lock.directory_));
  return lock;
}

void DirectoryLock::Release() {
  if (!held()) return;
  const Directory directory = std::exchange(directory_, Directory());
  // A forked child that leaves must not open the lock that its parent holds.
  if (owner_ == getpid()) {
    if (by_file_) {
      // Fails only where the whole directory is gone, or for a reason that
      // the next save will meet and name.
      (void)directory.Unlink(kLockFileName, /*missing_ok=*/true);
    } else {
      // Not left to close: a forked child may still have the descriptor.
      (void)internal::SystemCall("flock", directory.path(), [&] {
        return flock(directory.fd(), LOCK_UN);
      });
    }
  }
  by_file_ = false;
  owner_ = 0;
}

}  // namespace torch_ckpt
