// The process-wide host arena: memory that is reused, on huge pages.
//
// Fresh memory costs more than a disk write, so buffers are leased here and
// come back instead of being freed. One budget bounds the bytes that are
// mapped; regions are MADV_DONTFORK. All functions may be called from any
// thread. A forked child must not use the arena: Lease() refuses there.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "runtime/jobs.h"

namespace torch_ckpt {

// The arena maps, leases and page-locks memory in units of this.
inline constexpr size_t kArenaPage = size_t{2} << 20;

// Page-locks host memory, so that a device copies into it at full speed.
// Called from any thread; must outlive every arena that it is used with.
class PageLocker {
 public:
  virtual ~PageLocker() = default;
  virtual Status Lock(std::byte* data, size_t size) = 0;
  virtual void Unlock(std::byte* data) = 0;  // what Lock() took
};

enum class MemoryKind {
  kPrivate,  // anonymous memory of the process
  kShared,   // memory that another process can map (runtime/adopted.h)
};

// Where memory of kShared is for other processes. The descriptor is the
// arena's, as long as that lives.
struct SharedPlace {
  int fd = -1;
  uint64_t offset = 0;
};

class Arena;

// A leased region, aligned to 2 MiB, contents undefined. Goes back on
// destruction or Release(). Movable, not copyable.
class ArenaLease {
 public:
  ArenaLease() = default;
  ArenaLease(ArenaLease&& o) noexcept;
  ArenaLease& operator=(ArenaLease&& o) noexcept;
  ~ArenaLease();
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  MutableByteSpan span() const { return {data_, size_}; }
  explicit operator bool() const { return data_ != nullptr; }
  std::optional<SharedPlace> shared() const;
  void Release();
  // How much of it is in pages that the system has not given yet.
  size_t absent() const;
  // Has the system give those of [begin, begin + bytes) now. To be called
  // before anything is written there; threads that do so for different pages
  // (of kArenaPage) share the work. kExhausted where there is no memory.
  Status MakePresent(size_t begin, size_t bytes) const;
  // Page-locks what of [begin, begin + bytes) is not locked yet, in whole pages
  // of kArenaPage. It stays locked, through other leases too, until it is
  // unmapped. Every kArenaPage is locked by itself: no device copy may cross
  // their borders. After an error the memory is as usable as before.
  Status PageLock(PageLocker* locker, size_t begin, size_t bytes) const;

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  MemoryKind kind_ = MemoryKind::kPrivate;
};

struct LeaseOptions {
  // How long to wait for what others have.
  std::chrono::milliseconds patience{0};
  MemoryKind kind = MemoryKind::kPrivate;
  // Waiting ends with kCancelled when this job does. May be null.
  const Job* job = nullptr;
  // Whether every page is to be present. Those that have never been used are
  // left to MakePresent otherwise.
  bool present = true;
};

struct ArenaStats {
  uint64_t budget = 0, mapped = 0, leased = 0, peak_mapped = 0;
  uint64_t page_locked = 0;
};

// What becomes of idle memory when none of it can serve a request.
enum class IdleMemory {
  kKept,      // it stays, within the budget, for requests of other sizes
  kReplaced,  // it is unmapped first: whoever leases needs one size at a time
};

class Arena {
 public:
  // Buffers of pieces of files. Never destroyed.
  static Arena& Process();
  // Snapshots of states, each in one region. Never destroyed.
  static Arena& Snapshots();
  // `root` is before the paths of the system's files, for tests.
  explicit Arena(uint64_t budget_bytes, IdleMemory idle = IdleMemory::kKept,
                 std::string root = {});
  ~Arena();  // REQUIRES: no lease is out

  // At least `bytes` (rounded up to 2 MiB); private where the system lets no
  // memory be shared. Idle regions of the kind are reused first, those of any
  // are unmapped to make room second. When the budget is used up: waits, then
  // kExhausted. More than the whole budget is kExhausted at once.
  Result<ArenaLease> Lease(size_t bytes, const LeaseOptions& options = {});
  // Whether all of these bytes are in one lease that is out.
  bool IsLeased(ByteSpan bytes) const;
  // A smaller budget takes effect as leases come back.
  void SetBudget(uint64_t bytes);
  ArenaStats Stats() const;
  void Trim();  // unmaps every idle region

 private:
  friend class ArenaLease;
  struct Impl;
  Impl* impl_;
};

// A buffer for a worker of `job`, of the process's arena. Waits for one until
// others have kept theirs for ten minutes, or the job ends. `present`: see
// LeaseOptions.
Result<ArenaLease> LeaseBuffer(size_t bytes, const Job* job,
                               bool present = true);

// Of the process's buffers. Snapshots have no limit until one is set.
inline constexpr uint64_t kDefaultArenaBudget = uint64_t{256} << 20;

}  // namespace torch_ckpt
