// Native jobs: progress, cancellation, the first error and the result of a
// piece of work, found again by an int64 id (kind | generation | slot). A
// stale or foreign id is an error, never a crash. After fork the child refuses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"

namespace torch_ckpt {

enum class JobKind : uint8_t {
  kWrite = 1,
  kRead = 2,
  kMerge = 3,
  kVerify = 4,
  kStage = 5,
};

// Shared by the threads of one job and whoever watches it. Thread-safe.
class Job {
 public:
  explicit Job(JobKind kind) : kind_(kind) {}
  JobKind kind() const { return kind_; }

  void AddTotal(uint64_t bytes) { total_ += bytes; }
  void AddDone(uint64_t bytes) { done_ += bytes; }
  uint64_t total() const { return total_; }
  uint64_t done() const { return done_; }

  void Cancel() { cancelled_ = true; }
  bool cancelled() const { return cancelled_; }

  // That a worker has failed, so that the job will: whoever waits for anything
  // but the job's own workers gives up.
  void SetEnding() { ending_ = true; }
  bool ending() const { return ending_ || cancelled_; }

  // Keeps the first error; later ones are dropped. Returns what is kept.
  Status Fail(Status status);
  Status status() const;
  bool failed() const { return failed_; }

  void SetResult(std::string json);
  std::string result() const;

  // Keeps what a result points to until the job is freed.
  void Hold(std::shared_ptr<void> held);

 private:
  const JobKind kind_;
  std::atomic<uint64_t> total_{0}, done_{0};
  std::atomic<bool> cancelled_{false}, ending_{false}, failed_{false};
  mutable std::mutex mutex_;
  Status status_;
  std::string result_;
  std::shared_ptr<void> held_;
};

class JobRegistry {
 public:
  static JobRegistry& Process();  // never destroyed
  Result<int64_t> Create(JobKind kind);
  // kInvalidArgument for an unknown or freed id ("unknown job 7").
  Result<std::shared_ptr<Job>> Find(int64_t id);
  Status Free(int64_t id);
  int64_t LiveCount();

 private:
  struct Impl;
  JobRegistry();
  Impl* impl_;
};

// True in a process that was forked from one in which the core was loaded.
bool InForkedChild();

}  // namespace torch_ckpt
