// Native jobs: progress, cancellation, the first error and the result of a
// piece of work.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "runtime/handles.h"

namespace torch_ckpt {

// Shared by the threads of one job and whoever watches it. Thread-safe.
class Job {
 public:
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
  std::atomic<uint64_t> total_{0}, done_{0};
  std::atomic<bool> cancelled_{false}, ending_{false}, failed_{false};
  mutable std::mutex mutex_;
  Status status_;
  std::string result_;
  std::shared_ptr<void> held_;
};

// The jobs of the process that Python watches.
HandleTable<std::shared_ptr<Job>>& Jobs();

}  // namespace torch_ckpt
