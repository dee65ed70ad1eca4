#include "capi/sessions.h"

#include <map>
#include <mutex>
#include <string>

namespace torch_ckpt::capi {
namespace {

template <class Session>
class Table {
 public:
  // Never destroyed: a session that is alive at exit keeps its staging
  // directory for the next save to remove, as after a kill.
  static Table& Process() {
    static Table* table = new Table;
    return *table;
  }

  int64_t Keep(std::unique_ptr<Session> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t id = next_++;
    sessions_[id] = std::move(session);
    return id;
  }

  Result<std::unique_ptr<Session>> Take(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(id);
    if (it == sessions_.end()) {
      return InvalidArgument("unknown save session " + std::to_string(id));
    }
    std::unique_ptr<Session> session = std::move(it->second);
    sessions_.erase(it);
    return session;
  }

  void Return(int64_t id, std::unique_ptr<Session> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    sessions_[id] = std::move(session);
  }

 private:
  std::mutex mutex_;
  int64_t next_ = 1;
  std::map<int64_t, std::unique_ptr<Session>> sessions_;
};

using Saves = Table<SaveSession>;
using Parts = Table<PartSession>;

}  // namespace

int64_t KeepSession(std::unique_ptr<SaveSession> session) {
  return Saves::Process().Keep(std::move(session));
}
Result<std::unique_ptr<SaveSession>> TakeSession(int64_t id) {
  return Saves::Process().Take(id);
}
void ReturnSession(int64_t id, std::unique_ptr<SaveSession> session) {
  Saves::Process().Return(id, std::move(session));
}

int64_t KeepPart(std::unique_ptr<PartSession> part) {
  return Parts::Process().Keep(std::move(part));
}
Result<std::unique_ptr<PartSession>> TakePart(int64_t id) {
  return Parts::Process().Take(id);
}
void ReturnPart(int64_t id, std::unique_ptr<PartSession> part) {
  Parts::Process().Return(id, std::move(part));
}

}  // namespace torch_ckpt::capi
