#include "os/lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "os/call.h"
#include "os/lock_holder.h"
#include "os/path.h"
#include "os/patience.h"

namespace torch_ckpt {
namespace {

constexpr uint64_t kMaxLockFile = 4096;
// A right to a right to a lock: more is a fight.
constexpr int kMaxRights = 3;
constexpr std::chrono::milliseconds kHiddenPatience{500};

// The descriptors that hold locks, for the fork handlers.
class Held {
 public:
  static Held& Process() {
    static Held* const held = new Held;  // used until the very end
    return *held;
  }
  void Add(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fds_.push_back(fd);
  }
  void Remove(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(fds_, fd);
  }

 private:
  Held() {
    // Without memory for handlers children share the locks: no harm but a
    // lock that lives longer.
    (void)pthread_atfork([] { Process().mutex_.lock(); },
                         [] { Process().mutex_.unlock(); },
                         [] {
                           Process().Replace();
                           Process().mutex_.unlock();
                         });
  }

  // In the child, where only calls that a signal handler may make are safe, so
  // without fault points. The numbers stay taken: their owners close them.
  void Replace() {
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0) return;
    for (const int fd : fds_) dup3(null, fd, O_CLOEXEC);
    close(null);
    fds_.clear();
  }

  std::mutex mutex_;
  std::vector<int> fds_;
};

Status HeldBy(const std::string& who, const std::string& path) {
  return Conflict("another save holds the lock of this directory" + who)
      .WithFile(path);
}

Status JustNow(const Directory& directory) {
  return HeldBy(" (it was taken over just now)", directory.path());
}

// Whoever waits a little finds it free, or another holder.
Status GoneMeanwhile(const Directory& directory) {
  return Status::Io(ESTALE, "locking what was removed or replaced meanwhile",
                    directory.path());
}

// Makes the lock file `name`, or kConflict. `depth`: rights that are held.
Status MakeLockFile(const Directory& directory, const std::string& name,
                    const std::string& text, int depth);

// The same where it is there already.
Status ReplaceDead(const Directory& directory, const std::string& name,
                   const std::string& text, int depth) {
  const auto found = directory.ReadFile(name, kMaxLockFile);
  if (!found.ok()) {
    return found.status().sys_errno() == ENOENT ? GoneMeanwhile(directory)
                                                : found.status();
  }
  const auto holder = ParseLockHolder(*found);
  if (!holder) {
    return HeldBy("; its file '" + name +
                      "' does not say who; remove it if no save is running",
                  directory.path());
  }
  if (depth >= kMaxRights || !ProvablyDead(*holder)) {
    return HeldBy(": " + holder->Name() + "; remove the file '" + name +
                      "' if that one does not run any more",
                  directory.path());
  }
  const std::string right =
      std::string(kLockFileName) + ".after-" + holder->nonce;
  TC_RETURN_IF_ERROR(
      MakeLockFile(directory, right, ThisProcess().ToText(), depth + 1));
  const auto replace = [&]() -> Status {
    const auto again = directory.ReadFile(name, kMaxLockFile);
    if (!again.ok() || *again != *found) return JustNow(directory);
    TC_RETURN_IF_ERROR(directory.Unlink(name, /*missing_ok=*/true));
    Status made = directory.WriteFile(name, text);
    return made.sys_errno() == EEXIST ? JustNow(directory) : made;
  };
  Status replaced = replace();
  Status removed = directory.Unlink(right, /*missing_ok=*/true);
  return replaced.ok() ? removed : replaced;
}

Status MakeLockFile(const Directory& directory, const std::string& name,
                    const std::string& text, int depth) {
  Status made = directory.WriteFile(name, text);
  if (made.sys_errno() != EEXIST) return made;
  return ReplaceDead(directory, name, text, depth);
}

// Names under which NFS and FUSE keep a file that was unlinked while open.
bool HoldsHiddenOnly(const Directory& directory) {
  const auto names = directory.List();
  return names.ok() && std::ranges::all_of(*names, [](const std::string& name) {
           return name.starts_with(".nfs") || name.starts_with(".fuse_hidden");
         });
}

// What says "no such lock here": NFS and cluster file systems mounted without
// lock support, old kernels. NFS gives EBADF where flock wants a descriptor
// open for writing, which a directory's cannot be.
bool LacksLocks(int error) {
  return internal::LacksCall(error) || error == ENOLCK || error == EBADF;
}

int LockOpenFile(const File& file, short type) {
  return internal::SystemCall("ofd_lock", file.path(), [&] {
    struct flock whole = {};
    whole.l_type = type;
    whole.l_whence = SEEK_SET;
    return fcntl(file.fd(), F_OFD_SETLK, &whole);
  });
}

}  // namespace

DirectoryLock::DirectoryLock(DirectoryLock&& o) noexcept
    : directory_(std::exchange(o.directory_, Directory())),
      file_(std::exchange(o.file_, File())),
      held_(std::exchange(o.held_, false)),
      by_file_(std::exchange(o.by_file_, false)),
      owner_(std::exchange(o.owner_, 0)) {}

DirectoryLock& DirectoryLock::operator=(DirectoryLock&& o) noexcept {
  if (this != &o) {
    Release();
    directory_ = std::exchange(o.directory_, Directory());
    file_ = std::exchange(o.file_, File());
    held_ = std::exchange(o.held_, false);
    by_file_ = std::exchange(o.by_file_, false);
    owner_ = std::exchange(o.owner_, 0);
  }
  return *this;
}

DirectoryLock::~DirectoryLock() { Release(); }

Result<DirectoryLock> DirectoryLock::Acquire(const std::string& path) {
  DirectoryLock lock;
  TC_ASSIGN_OR_RETURN(lock.directory_, Directory::Open(path));
  lock.owner_ = getpid();
  // Before it holds anything, so that no fork comes between.
  Held::Process().Add(lock.directory_.fd());
  TC_RETURN_IF_ERROR(lock.Lock());
  lock.held_ = true;
  return lock;
}

Result<bool> DirectoryLock::IsHeld(const std::string& path) {
  TC_ASSIGN_OR_RETURN(const Directory directory, Directory::Open(path));
  const std::string name(kLockFileName);
  const Result<File> file = directory.OpenFile(name, {});
  if (file.status().sys_errno() == ENOENT) return false;
  TC_RETURN_IF_ERROR(file.status());
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  const int asked = internal::SystemCall("ofd_getlk", file->path(), [&] {
    return fcntl(file->fd(), F_OFD_GETLK, &whole);
  });
  if (asked == 0 && whole.l_type != F_UNLCK) return true;
  if (asked != 0 && !LacksLocks(errno)) {
    return Status::Io(errno, "ofd_getlk", file->path());
  }
  if (asked == 0) return false;
  const Result<std::string> text = directory.ReadFile(name, kMaxLockFile);
  if (text.status().sys_errno() == ENOENT) return false;
  TC_RETURN_IF_ERROR(text.status());
  const auto holder = ParseLockHolder(*text);
  return !holder || !ProvablyDead(*holder);
}

Status DirectoryLock::Lock() {
  const std::string& path = directory_.path();
  bool by_kernel = internal::SystemCall("flock", path, [&] {
                     return flock(directory_.fd(), LOCK_EX | LOCK_NB);
                   }) == 0;
  if (!by_kernel) {
    if (errno == EWOULDBLOCK) return HeldBy("", path);
    if (!LacksLocks(errno)) return Status::Io(errno, "flock", path);
  }
  const std::string name(kLockFileName);
  Result<File> opened =
      directory_.OpenFile(name, {.write = true, .create_new = true});
  const bool made = opened.ok();
  if (!made && opened.status().sys_errno() == EEXIST) {
    opened = directory_.OpenFile(name, {.write = true});
    // Given back just now; or on another node, long ago, which a client may
    // remember otherwise for a while.
    if (opened.status().sys_errno() == ENOENT) return GoneMeanwhile(directory_);
  }
  TC_ASSIGN_OR_RETURN(file_, std::move(opened));
  Held::Process().Add(file_.fd());
  const std::string text = ThisProcess().ToText();
  if (LockOpenFile(file_, F_WRLCK) == 0) {
    by_kernel = true;
  } else if (errno == EAGAIN || errno == EACCES) {
    const auto found = directory_.ReadFile(name, kMaxLockFile);
    const auto holder = ParseLockHolder(found.ok() ? *found : "");
    return HeldBy(holder ? ": " + holder->Name() : "", path);
  } else if (!LacksLocks(errno)) {
    return Status::Io(errno, "ofd_lock", file_.path());
  }
  if (!by_kernel && !made) {
    TC_RETURN_IF_ERROR(TakeOver());
    by_file_ = true;
    return CheckStillThere();
  }
  TC_RETURN_IF_ERROR(CheckStillThere());
  if (!made) TC_RETURN_IF_ERROR(file_.Truncate(0));
  Status written = file_.WriteAll(AsBytes(text), 0);
  if (!by_kernel) {
    // It is all that there is of this lock.
    if (written.ok()) written = file_.Sync();
    if (!written.ok()) (void)directory_.Unlink(name, /*missing_ok=*/true);
    by_file_ = true;
  }
  return written;
}

Status DirectoryLock::TakeOver() {
  const std::string name(kLockFileName);
  TC_RETURN_IF_ERROR(ReplaceDead(directory_, name, ThisProcess().ToText(), 0));
  Held::Process().Remove(file_.fd());
  TC_ASSIGN_OR_RETURN(file_, directory_.OpenFile(name, {}));
  Held::Process().Add(file_.fd());
  return {};
}

// The holder of a lock removes or renames its directory when it is done, and
// removes its file: a lock on what has no name any more protects nothing.
Status DirectoryLock::CheckStillThere() const {
  TC_ASSIGN_OR_RETURN(const FileInfo directory, directory_.Stat());
  TC_ASSIGN_OR_RETURN(const FileInfo file, file_.Stat());
  // By an open, which network file systems answer from the server.
  auto again = Directory::Open(directory_.path());
  if (!again.ok() && again.status().sys_errno() != ENOENT) {
    return again.status();
  }
  if (again.ok()) {
    TC_ASSIGN_OR_RETURN(const FileInfo now, again->Stat());
    TC_ASSIGN_OR_RETURN(const auto named, again->StatEntry(kLockFileName));
    if (named && named->is_link) {
      return Corrupt(
                 "is a symbolic link; remove it if no save of yours made it")
          .WithFile(file_.path());
    }
    if (now.SameFile(directory) && named && named->SameFile(file)) return {};
  }
  return GoneMeanwhile(directory_);
}

void DirectoryLock::RemoveFile() {
  // Another one's if somebody has removed ours by hand. A failure is one that
  // the next save will meet and name.
  const Result<FileInfo> own = file_.Stat();
  const auto named = directory_.StatEntry(kLockFileName);
  if (own.ok() && named.ok() && *named && (*named)->SameFile(*own)) {
    (void)directory_.Unlink(kLockFileName, /*missing_ok=*/true);
  }
}

void DirectoryLock::CloseFile() {
  if (!file_.valid()) return;
  // Not left to close: a child of a bare clone may have the descriptor.
  if (!by_file_) (void)LockOpenFile(file_, F_UNLCK);
  Held::Process().Remove(file_.fd());
  file_ = File();
}

void DirectoryLock::Forget() {
  for (const int fd : {directory_.fd(), file_.fd()}) {
    if (fd >= 0) Held::Process().Remove(fd);
  }
  directory_ = Directory();
  file_ = File();
  held_ = by_file_ = false;
  owner_ = 0;
}

void DirectoryLock::Release() {
  // A forked child that leaves must not open the lock that its parent holds.
  if (held_ && owner_ == getpid()) {
    if (file_.valid()) RemoveFile();
    CloseFile();
    if (!by_file_) {
      (void)internal::SystemCall("flock", directory_.path(), [&] {
        return flock(directory_.fd(), LOCK_UN);
      });
    }
  }
  Forget();
}

Status DirectoryLock::Remove() {
  if (!held_ || owner_ != getpid()) return {};
  const std::string path = directory_.path();
  // While the directory itself is locked still, so that nothing of a save that
  // takes it next is touched; and a directory that is not empty does not go.
  RemoveFile();
  // NFS and FUSE keep a file that is open under a hidden name.
  CloseFile();
  const auto remove = [&]() -> Status {
    TC_ASSIGN_OR_RETURN(const FileInfo own, directory_.Stat());
    TC_ASSIGN_OR_RETURN(const auto named, StatPathEntry(path));
    if (!named || !named->SameFile(own)) return {};
    TC_ASSIGN_OR_RETURN(const Directory parent,
                        Directory::Open(ParentPath(path)));
    return parent.RemoveDirectory(BaseName(path), /*missing_ok=*/true);
  };
  Status removed;
  Patience patience(kHiddenPatience);  // what is closed goes in a while
  do {
    removed = remove();
  } while (removed.sys_errno() == ENOTEMPTY && HoldsHiddenOnly(directory_) &&
           patience.Wait());
  Release();
  return removed.sys_errno() == ENOTEMPTY ? Status() : removed;
}

}  // namespace torch_ckpt
