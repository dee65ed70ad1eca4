// Objects that Python holds by number.
//
// T is a pointer: std::shared_ptr where several callers use an object at once
// (Find), std::unique_ptr where one at a time does (Take, and PutBack when it
// is to be used again). Ids count up over all tables of the process and never
// come back: a stale id, or one of another table, is an error and never
// another object. A forked child is refused. A table is never destroyed, since
// threads may outlive static objects: say
//
//   HandleTable<std::shared_ptr<Thing>>& Things() {  // in a .cc: there is one
//     static auto* const table =
//         new HandleTable<std::shared_ptr<Thing>>("thing");
//     return *table;
//   }
//
// Thread-safe. What is taken out is destroyed by the caller, outside the lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/status.h"
#include "os/fork.h"

namespace torch_ckpt {

inline std::atomic<int64_t> next_handle{1};

template <class T>
class HandleTable {
 public:
  // `noun` says what an unknown id is not: "unknown job 7".
  explicit HandleTable(const char* noun) : noun_(noun) {}
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  Result<int64_t> Add(T object) {
    TC_RETURN_IF_ERROR(NotInForkedChild());
    const int64_t id = next_handle++;
    PutBack(id, std::move(object));
    return id;
  }

  // The object, which stays in the table. kInvalidArgument for an id that is
  // not in it.
  Result<T> Find(int64_t id) {
    TC_RETURN_IF_ERROR(NotInForkedChild());
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = objects_.find(id);
    if (it == objects_.end()) return Unknown(id);
    return it->second;
  }

  // The object, out of the table. kInvalidArgument as above.
  Result<T> Take(int64_t id) {
    TC_RETURN_IF_ERROR(NotInForkedChild());
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = objects_.find(id);
    if (it == objects_.end()) return Unknown(id);
    T object = std::move(it->second);
    objects_.erase(it);
    return object;
  }

  // What was taken, under the id that it had.
  void PutBack(int64_t id, T object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.emplace(id, std::move(object));
  }

 private:
  Status Unknown(int64_t id) const {
    return InvalidArgument("unknown " + std::string(noun_) + " " +
                           std::to_string(id));
  }

  const char* const noun_;
  std::mutex mutex_;
  std::unordered_map<int64_t, T> objects_;
};

}  // namespace torch_ckpt
