#include "json/held.h"

// One table of each in the process, whichever library asks.
namespace torch_ckpt {

HandleTable<std::shared_ptr<const Checkpoint>>& Checkpoints() {
  static auto* const table =
      new HandleTable<std::shared_ptr<const Checkpoint>>("opened checkpoint");
  return *table;
}

HandleTable<std::shared_ptr<OpenFiles>>& HeldFiles() {
  static auto* const table =
      new HandleTable<std::shared_ptr<OpenFiles>>("hold on open files");
  return *table;
}

HandleTable<std::unique_ptr<SaveSession>>& Saves() {
  static auto* const table =
      new HandleTable<std::unique_ptr<SaveSession>>("save session");
  return *table;
}

HandleTable<std::unique_ptr<PartSession>>& Parts() {
  static auto* const table =
      new HandleTable<std::unique_ptr<PartSession>>("part of a save");
  return *table;
}

Result<std::shared_ptr<const Checkpoint>> CheckpointOf(const Json& object) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(object, "checkpoint", 0));
  if (id != 0) return Checkpoints().Find(id);
  TC_ASSIGN_OR_RETURN(const std::string path, GetPath(object, "path"));
  std::string format;
  const auto given = object.find("format");
  if (given != object.end() && !given->is_null()) {
    TC_ASSIGN_OR_RETURN(format, GetString(object, "format"));
  }
  return OpenCheckpoint(path, format);
}

Result<std::shared_ptr<Job>> JobOf(const Json& object) {
  TC_ASSIGN_OR_RETURN(const int64_t id, GetInt(object, "job", 0));
  if (id == 0) return std::make_shared<Job>();
  return Jobs().Find(id);
}

}  // namespace torch_ckpt
