#include "capi/sessions.h"

#include <map>
#include <mutex>
#include <string>

namespace torch_ckpt::capi {
namespace {

struct Table {
  std::mutex mutex;
  int64_t next = 1;
  std::map<int64_t, std::unique_ptr<SaveSession>> sessions;
};

// Never destroyed: a session that is alive at exit keeps its staging directory
// for the next save to remove, as after a kill.
Table& Sessions() {
  static Table* table = new Table;
  return *table;
}

}  // namespace

int64_t KeepSession(std::unique_ptr<SaveSession> session) {
  Table& table = Sessions();
  std::lock_guard<std::mutex> lock(table.mutex);
  const int64_t id = table.next++;
  table.sessions[id] = std::move(session);
  return id;
}

Result<std::unique_ptr<SaveSession>> TakeSession(int64_t id) {
  Table& table = Sessions();
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto it = table.sessions.find(id);
  if (it == table.sessions.end()) {
    return InvalidArgument("unknown save session " + std::to_string(id));
  }
  std::unique_ptr<SaveSession> session = std::move(it->second);
  table.sessions.erase(it);
  return session;
}

void ReturnSession(int64_t id, std::unique_ptr<SaveSession> session) {
  Table& table = Sessions();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.sessions[id] = std::move(session);
}

}  // namespace torch_ckpt::capi
