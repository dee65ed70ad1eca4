#include "runtime/workers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

using ItemFunction = std::function<Status(int64_t item, int worker)>;

Status InternalError(const char* what) noexcept {
  try {
    return Internal(std::string("unexpected exception: ") + what);
  } catch (...) {  // no memory for the text
    return Status(ErrorKind::kInternal, std::string());
  }
}

Status RunItem(const ItemFunction& fn, int64_t item, int worker) noexcept {
  try {
    return fn(item, worker);
  } catch (const std::bad_alloc&) {
    // Short enough to need no memory itself.
    return Status(ErrorKind::kExhausted, "out of memory");
  } catch (const std::exception& e) {
    return InternalError(e.what());
  } catch (...) {
    return InternalError("of an unknown type");
  }
}

// What the threads of one ForEachItem share.
struct Shared {
  Shared(int64_t item_count, Job* watched, const ItemFunction& function)
      : items(item_count), job(watched), fn(function) {}

  const int64_t items;
  Job* const job;
  const ItemFunction& fn;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Status first;

  void Stop(Status status) noexcept {
    stop = true;
    if (job != nullptr) job->SetEnding();
    std::lock_guard<std::mutex> lock(mutex);
    if (first.ok()) first = std::move(status);
  }

  void Work(int worker) noexcept {
    while (!stop) {
      if (job != nullptr && job->cancelled()) {
        // Asked before an item is taken, so that a cancel that comes after
        // the last one changes nothing.
        if (next < items) Stop(Status(ErrorKind::kCancelled, "cancelled"));
        return;
      }
      const int64_t item = next.fetch_add(1);
      if (item >= items) return;
      Status status = RunItem(fn, item, worker);
      if (!status.ok()) Stop(std::move(status));
    }
  }
};

}  // namespace

Status ForEachItem(int workers, int64_t items, Job* job,
                   const ItemFunction& fn) {
  if (items <= 0) return {};
  Shared shared(items, job, fn);
  const int64_t wanted = std::clamp<int64_t>(workers, 1, items);
  std::vector<std::thread> threads;
  try {
    threads.reserve(static_cast<size_t>(wanted - 1));
    for (int worker = 1; worker < wanted; ++worker) {
      threads.emplace_back([&shared, worker] { shared.Work(worker); });
    }
  } catch (const std::system_error&) {
    // A limit on threads: those there are do all the items, only slower.
  } catch (const std::bad_alloc&) {
    // The same for memory.
  }
  shared.Work(0);
  for (std::thread& thread : threads) thread.join();
  return std::move(shared.first);
}

}  // namespace torch_ckpt
