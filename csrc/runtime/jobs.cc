#include "runtime/jobs.h"

#include <utility>

namespace torch_ckpt {

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

HandleTable<std::shared_ptr<Job>>& Jobs() {
  static auto* const table = new HandleTable<std::shared_ptr<Job>>("job");
  return *table;
}

}  // namespace torch_ckpt
