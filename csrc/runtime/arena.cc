#include "runtime/arena.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/stretches.h"
#include "os/control_group.h"
#include "os/fork.h"
#include "os/memory.h"
#include "os/shared_memory.h"

namespace torch_ckpt {
namespace {

constexpr size_t kHugePage = kArenaPage;
// A waiter looks so often whether its job goes on.
constexpr std::chrono::milliseconds kLook{50};
// More than there is, and still a number that can be rounded up.
constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max() - kHugePage;
// Below this nobody asks whether there is room.
constexpr size_t kLargeRegion = size_t{64} << 20;

// Asked before: past its limit a control group is killed, not refused.
Status EnoughRoom(size_t bytes, const std::string& root) {
  if (bytes < kLargeRegion) return {};
  const std::optional<uint64_t> room = ControlGroupRoom(root);
  if (!room || bytes <= *room) return {};
  return Exhausted("a region of " + std::to_string(bytes) +
                   " bytes is more than the " + std::to_string(*room) +
                   " that the memory limit of this process's control group "
                   "leaves");
}

}  // namespace

// Idle memory is kept by address, and neighbours of a kind are joined, so that
// what came back in small stretches can go out again as a large one. A lease
// takes just the bytes that it needs from an idle region: leased bytes are
// always the sum of the rounded requests, and whoever plans within the budget
// never waits on waste.
struct Arena::Impl {
  mutable std::mutex mutex;
  std::condition_variable returned;
  std::array<Stretches, 2> idle;           // of kPrivate and of kShared
  std::unique_ptr<SharedMemory> shared;    // made for the first who asks
  std::map<const std::byte*, size_t> out;  // what is leased
  IdleMemory policy = IdleMemory::kKept;
  // By page, since a page belongs to one lease or to none: memory can then be
  // unmapped, hence unlocked, without touching what others copy into.
  std::map<std::byte*, PageLocker*> locked;
  std::set<std::byte*> absent;  // pages that the system has not given yet
  uint64_t budget = 0, mapped = 0, leased = 0, peak_mapped = 0;

  uint64_t mapping = 0;  // counted in mapped, but not there yet
  std::string root;      // see the constructor

  // All below REQUIRE: mutex is held.

  // What the budget leaves once every idle region is unmapped.
  uint64_t Room() const {
    const uint64_t taken = leased + mapping;
    return budget > taken ? budget - taken : 0;
  }

  Stretches& Idle(MemoryKind kind) { return idle[static_cast<size_t>(kind)]; }

  // The end of the smallest idle region that is large enough; null if none is.
  std::byte* TakeIdle(MemoryKind kind, size_t size) {
    Stretches& regions = Idle(kind);
    auto best = regions.end();
    for (auto it = regions.begin(); it != regions.end(); ++it) {
      if (it->second >= size &&
          (best == regions.end() || it->second < best->second)) {
        best = it;
      }
    }
    if (best == regions.end()) return nullptr;
    best->second -= size;
    std::byte* const data = best->first + best->second;
    if (best->second == 0) regions.erase(best);
    return data;
  }

  // New memory, no page of it present. REQUIRES: the mutex is not held.
  Result<std::byte*> Map(MemoryKind kind, size_t size) const {
    TC_RETURN_IF_ERROR(EnoughRoom(size, root));
    return kind == MemoryKind::kShared ? shared->Map(size)
                                       : MapMemory(size, kHugePage);
  }

  // REQUIRES: the mutex is not held.
  Status MakePresent(MemoryKind kind, std::byte* data, size_t size) const {
    return kind == MemoryKind::kShared ? shared->MakePresent(data, size)
                                       : torch_ckpt::MakePresent(data, size);
  }

  // New memory, all of it present or all noted as absent. It is counted before
  // it is there, so that others may go on while `lock` is open.
  Result<std::byte*> MapFresh(MemoryKind kind, size_t size, bool present,
                              std::unique_lock<std::mutex>* lock) {
    mapped += size;
    mapping += size;
    peak_mapped = std::max(peak_mapped, mapped);
    lock->unlock();
    Result<std::byte*> data = Map(kind, size);
    Status status = data.status();
    if (status.ok() && present) status = MakePresent(kind, *data, size);
    lock->lock();
    mapping -= size;
    try {
      for (size_t at = 0; status.ok() && !present && at < size;
           at += kHugePage) {
        absent.insert(absent.end(), *data + at);
      }
    } catch (const std::bad_alloc&) {
      status = Exhausted("no memory for the note of a lease");
    }
    if (status.ok()) return data;
    if (!data.ok() || Unmap(kind, *data, size)) mapped -= size;
    returned.notify_all();
    return status;
  }

  // False where the system does not take them: they are still there then.
  // Locked pages are unlocked first: a device must not keep memory that the
  // system gives to others.
  bool Unmap(MemoryKind kind, std::byte* data, size_t size) {
    const auto end = locked.lower_bound(data + size);
    for (auto it = locked.lower_bound(data); it != end;) {
      it->second->Unlock(it->first);
      it = locked.erase(it);
    }
    if (!(kind == MemoryKind::kShared ? shared->Unmap(data, size)
                                      : UnmapMemory(data, size))) {
      return false;
    }
    absent.erase(absent.lower_bound(data), absent.lower_bound(data + size));
    return true;
  }

  // Unmaps at least min(bytes, all) of idle memory, the smallest regions first:
  // large ones are the most useful. What the system does not take stays idle.
  void UnmapIdle(uint64_t bytes) {
    while (bytes > 0) {
      MemoryKind kind = MemoryKind::kPrivate;
      auto smallest = Idle(kind).end();
      for (MemoryKind k : {MemoryKind::kPrivate, MemoryKind::kShared}) {
        for (auto it = Idle(k).begin(); it != Idle(k).end(); ++it) {
          if (smallest != Idle(kind).end() && it->second >= smallest->second) {
            continue;
          }
          smallest = it;
          kind = k;
        }
      }
      if (smallest == Idle(kind).end()) return;
      const size_t part =
          std::min<uint64_t>(smallest->second, RoundUp(bytes, kHugePage));
      if (!Unmap(kind, smallest->first + smallest->second - part, part)) return;
      smallest->second -= part;
      if (smallest->second == 0) Idle(kind).erase(smallest);
      mapped -= part;
      bytes -= std::min<uint64_t>(bytes, part);
    }
  }

  void ShrinkToBudget() {
    if (mapped > budget) UnmapIdle(mapped - budget);
  }
};

ArenaLease::ArenaLease(ArenaLease&& o) noexcept
    : arena_(std::exchange(o.arena_, nullptr)),
      data_(std::exchange(o.data_, nullptr)),
      size_(std::exchange(o.size_, 0)),
      kind_(o.kind_) {}

ArenaLease& ArenaLease::operator=(ArenaLease&& o) noexcept {
  if (this != &o) {
    Release();
    arena_ = std::exchange(o.arena_, nullptr);
    data_ = std::exchange(o.data_, nullptr);
    size_ = std::exchange(o.size_, 0);
    kind_ = o.kind_;
  }
  return *this;
}

ArenaLease::~ArenaLease() { Release(); }

void ArenaLease::Release() {
  Arena* const arena = std::exchange(arena_, nullptr);
  std::byte* const data = std::exchange(data_, nullptr);
  const size_t size = std::exchange(size_, 0);
  // In a forked child the memory is not there and the mutex may never be free.
  if (arena == nullptr || InForkedChild()) return;
  Arena::Impl& impl = *arena->impl_;
  std::lock_guard<std::mutex> lock(impl.mutex);
  impl.out.erase(data);
  impl.leased -= size;
  try {
    AddStretch(&impl.Idle(kind_), data, size);
  } catch (const std::bad_alloc&) {  // no memory for the note of it
    if (impl.Unmap(kind_, data, size)) impl.mapped -= size;
  }
  impl.ShrinkToBudget();
  impl.returned.notify_all();
}

std::optional<SharedPlace> ArenaLease::shared() const {
  if (arena_ == nullptr || kind_ != MemoryKind::kShared) return std::nullopt;
  const SharedMemory& memory = *arena_->impl_->shared;
  return SharedPlace{memory.fd(), memory.OffsetOf(data_)};
}

size_t ArenaLease::absent() const {
  if (arena_ == nullptr || InForkedChild()) return 0;
  Arena::Impl& impl = *arena_->impl_;
  std::lock_guard<std::mutex> lock(impl.mutex);
  const auto pages = std::distance(impl.absent.lower_bound(data_),
                                   impl.absent.lower_bound(data_ + size_));
  return static_cast<size_t>(pages) * kHugePage;
}

Status ArenaLease::MakePresent(size_t begin, size_t bytes) const {
  if (arena_ == nullptr || InForkedChild()) return {};
  Arena::Impl& impl = *arena_->impl_;
  std::byte* const end = data_ + std::min(size_, begin + bytes);
  std::byte *first = nullptr, *last = nullptr;
  {
    std::lock_guard<std::mutex> lock(impl.mutex);
    const auto it =
        impl.absent.lower_bound(data_ + RoundDown(begin, kHugePage));
    const auto stop = impl.absent.lower_bound(end);
    if (it == stop) return {};
    first = *it;
    last = *std::prev(stop) + kHugePage;
  }
  // Takes long; the pages are this lease's alone, so others may go on.
  TC_RETURN_IF_ERROR(
      impl.MakePresent(kind_, first, static_cast<size_t>(last - first)));
  std::lock_guard<std::mutex> lock(impl.mutex);
  impl.absent.erase(impl.absent.lower_bound(first),
                    impl.absent.lower_bound(last));
  return {};
}

Status ArenaLease::PageLock(PageLocker* locker, size_t begin,
                            size_t bytes) const {
  if (arena_ == nullptr || InForkedChild()) return {};
  Arena::Impl& impl = *arena_->impl_;
  std::byte* const end = data_ + std::min(size_, begin + bytes);
  for (std::byte* page = data_ + RoundDown(begin, kHugePage); page < end;
       page += kHugePage) {
    {
      std::lock_guard<std::mutex> lock(impl.mutex);
      // Noted before it is done, as a note may need memory that is not there.
      if (!impl.locked.emplace(page, locker).second) continue;
    }
    // Takes long; the page is this lease's alone, so others may go on.
    Status status = locker->Lock(page, kHugePage);
    if (status.ok()) continue;
    std::lock_guard<std::mutex> lock(impl.mutex);
    impl.locked.erase(page);
    return status;
  }
  return {};
}

Arena& Arena::Process() {
  static Arena* const arena = new Arena(kDefaultArenaBudget);
  return *arena;
}

Arena& Arena::Snapshots() {
  static Arena* const arena =
      new Arena(std::numeric_limits<uint64_t>::max(), IdleMemory::kReplaced);
  return *arena;
}

Arena::Arena(uint64_t budget_bytes, IdleMemory idle, std::string root)
    : impl_(new Impl) {
  impl_->root = std::move(root);
  impl_->budget = budget_bytes;
  impl_->policy = idle;
}

Arena::~Arena() {
  Trim();
  delete impl_;
}

Result<ArenaLease> Arena::Lease(size_t bytes, const LeaseOptions& options) {
  using Clock = std::chrono::steady_clock;
  TC_RETURN_IF_ERROR(NotInForkedChild());
  if (bytes > std::numeric_limits<size_t>::max() - 2 * kHugePage) {
    return Exhausted("no machine has " + std::to_string(bytes) + " bytes");
  }
  const size_t size = RoundUp(std::max<size_t>(bytes, 1), kHugePage);
  // Bounded, since now() + milliseconds::max() would overflow.
  const auto deadline =
      Clock::now() + std::min<std::chrono::milliseconds>(
                         options.patience, std::chrono::hours(8760));

  ArenaLease lease;
  std::unique_lock<std::mutex> lock(impl_->mutex);
  MemoryKind kind = options.kind;
  if (kind == MemoryKind::kShared && impl_->shared == nullptr) {
    auto made = SharedMemory::Create(kHugePage);
    if (made.ok()) {
      impl_->shared = std::move(made).value();
    } else {
      kind = MemoryKind::kPrivate;
    }
  }
  lease.kind_ = kind;
  for (bool last_look = false;;) {
    if (size > impl_->budget) {
      return Exhausted("a buffer of " + std::to_string(size) +
                       " bytes is more than the host memory budget of " +
                       std::to_string(impl_->budget) + " bytes");
    }
    lease.data_ = impl_->TakeIdle(kind, size);
    if (lease.data_ != nullptr) break;
    if (size <= impl_->Room()) {
      if (impl_->policy == IdleMemory::kReplaced) impl_->UnmapIdle(kAll);
      const uint64_t after = impl_->mapped + size;
      if (after > impl_->budget) impl_->UnmapIdle(after - impl_->budget);
    }
    // Idle memory that the system has not taken back leaves no room.
    if (size <= impl_->Room() && impl_->mapped + size <= impl_->budget) {
      TC_ASSIGN_OR_RETURN(lease.data_,
                          impl_->MapFresh(kind, size, options.present, &lock));
      break;
    }
    if (last_look) {
      return Exhausted(
          "no buffer of " + std::to_string(size) +
          " bytes came free in time: " + std::to_string(impl_->leased) +
          " of the host memory budget of " + std::to_string(impl_->budget) +
          " bytes are in use");
    }
    if (options.job == nullptr) {
      impl_->returned.wait_until(lock, deadline);
    } else {
      impl_->returned.wait_until(lock,
                                 std::min(deadline, Clock::now() + kLook));
      if (options.job->ending()) {
        return Cancelled("the job ended while it waited for a buffer");
      }
    }
    last_look = Clock::now() >= deadline;
  }
  impl_->leased += size;
  lease.arena_ = this;
  lease.size_ = size;
  try {
    impl_->out.emplace(lease.data_, size);
  } catch (const std::bad_alloc&) {
    lock.unlock();
    lease.Release();
    return Exhausted("no memory for the note of a lease");
  }
  lock.unlock();
  // What an earlier lease of it has left.
  if (options.present) TC_RETURN_IF_ERROR(lease.MakePresent(0, size));
  return lease;
}

Result<ArenaLease> LeaseBuffer(size_t bytes, const Job* job, bool present) {
  return Arena::Process().Lease(
      bytes,
      {.patience = std::chrono::minutes(10), .job = job, .present = present});
}

bool Arena::IsLeased(ByteSpan bytes) const {
  if (InForkedChild()) return false;
  std::lock_guard<std::mutex> lock(impl_->mutex);
  auto lease = impl_->out.upper_bound(bytes.data());
  if (lease == impl_->out.begin()) return false;
  --lease;
  return bytes.data() + bytes.size() <= lease->first + lease->second;
}

void Arena::SetBudget(uint64_t bytes) {
  if (InForkedChild()) return;
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->budget = bytes;
  impl_->ShrinkToBudget();
  impl_->returned.notify_all();  // there may be more room, or none at all
}

ArenaStats Arena::Stats() const {
  if (InForkedChild()) return {};
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return {impl_->budget, impl_->mapped, impl_->leased, impl_->peak_mapped,
          impl_->locked.size() * kHugePage};
}

void Arena::Trim() {
  if (InForkedChild()) return;
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->UnmapIdle(kAll);
}

}  // namespace torch_ckpt
