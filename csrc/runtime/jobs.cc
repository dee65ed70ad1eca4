#include "runtime/jobs.h"

#include <pthread.h>

#include <limits>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

std::atomic<bool> in_forked_child{false};

// Registered while the library is loaded, before anything can have forked from
// a process that used it.
const int fork_watch =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

constexpr int kKindShift = 56;
constexpr int kGenerationShift = 32;
constexpr uint32_t kLastGeneration = (uint32_t{1} << 24) - 1;

Status Unknown(int64_t id) {
  return InvalidArgument("unknown job " + std::to_string(id));
}

Status RefusedInChild() {
  return Unsupported(
      "torch_ckpt was loaded before this process was forked, and its threads "
      "and buffers stayed with the parent; start workers with the 'spawn' or "
      "'forkserver' method to use it in them");
}

}  // namespace

bool InForkedChild() {
  // Without the watch no fork is ever seen; it fails only for want of memory
  // at load time.
  return in_forked_child.load(std::memory_order_relaxed) && fork_watch == 0;
}

Status Job::Fail(Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (status_.ok() && !status.ok()) {
    status_ = std::move(status);
    failed_ = true;
  }
  return status_;
}

Status Job::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void Job::SetResult(std::string json) {
  std::lock_guard<std::mutex> lock(mutex_);
  result_ = std::move(json);
}

std::string Job::result() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return result_;
}

void Job::Hold(std::shared_ptr<void> held) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ = std::move(held);
}

// id = kind (8 bits) | generation (24) | slot (32). Kinds are below 128, so
// ids are positive; generations start at 1, so no id is small enough to be
// some other number by accident.
struct JobRegistry::Impl {
  struct Slot {
    uint32_t generation = 0;
    std::shared_ptr<Job> job;  // null when the slot is free
  };
  std::mutex mutex;
  std::vector<Slot> slots;
  std::vector<uint32_t> free_slots;
  int64_t live = 0;

  // The slot of a live job, or null. REQUIRES: mutex is held.
  Slot* Lookup(int64_t id) {
    if (id <= 0) return nullptr;
    const auto bits = static_cast<uint64_t>(id);
    const size_t index = bits & std::numeric_limits<uint32_t>::max();
    if (index >= slots.size()) return nullptr;
    Slot& slot = slots[index];
    if (slot.job == nullptr ||
        slot.generation != ((bits >> kGenerationShift) & kLastGeneration)) {
      return nullptr;
    }
    return static_cast<uint64_t>(slot.job->kind()) == bits >> kKindShift
               ? &slot
               : nullptr;
  }
};

JobRegistry::JobRegistry() : impl_(new Impl) {}

JobRegistry& JobRegistry::Process() {
  // Never destroyed: worker threads may outlive the static destructors.
  static JobRegistry* const registry = new JobRegistry;
  return *registry;
}

// In a forked child the mutex may be held for ever by a thread that is not
// there, so every function looks before it locks.

Result<int64_t> JobRegistry::Create(JobKind kind) {
  if (InForkedChild()) return RefusedInChild();
  auto job = std::make_shared<Job>(kind);
  std::lock_guard<std::mutex> lock(impl_->mutex);
  if (impl_->free_slots.empty()) {
    if (impl_->slots.size() > std::numeric_limits<uint32_t>::max()) {
      return Exhausted("no more jobs can be made in this process");
    }
    impl_->free_slots.push_back(static_cast<uint32_t>(impl_->slots.size()));
    impl_->slots.emplace_back();
  }
  const uint32_t index = impl_->free_slots.back();
  impl_->free_slots.pop_back();
  Impl::Slot& slot = impl_->slots[index];
  ++slot.generation;
  slot.job = std::move(job);
  ++impl_->live;
  return static_cast<int64_t>(
      uint64_t{static_cast<uint8_t>(kind)} << kKindShift |
      uint64_t{slot.generation} << kGenerationShift | index);
}

Result<std::shared_ptr<Job>> JobRegistry::Find(int64_t id) {
  if (InForkedChild()) return RefusedInChild();
  std::lock_guard<std::mutex> lock(impl_->mutex);
  const Impl::Slot* slot = impl_->Lookup(id);
  if (slot == nullptr) return Unknown(id);
  return slot->job;
}

Status JobRegistry::Free(int64_t id) {
  if (InForkedChild()) return RefusedInChild();
  std::shared_ptr<Job> job;  // destroyed after the mutex is free again
  std::lock_guard<std::mutex> lock(impl_->mutex);
  Impl::Slot* slot = impl_->Lookup(id);
  if (slot == nullptr) return Unknown(id);
  job = std::move(slot->job);
  slot->job = nullptr;
  --impl_->live;
  // A slot that has used up its generations is given up, not begun again: its
  // first ids would come back to life.
  if (slot->generation < kLastGeneration) {
    impl_->free_slots.push_back(
        static_cast<uint32_t>(slot - impl_->slots.data()));
  }
  return {};
}

int64_t JobRegistry::LiveCount() {
  if (InForkedChild()) return 0;
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->live;
}

}  // namespace torch_ckpt
