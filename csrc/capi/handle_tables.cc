// The tables themselves: one of each in the process, whichever library asks.
#include "capi/checkpoints.h"
#include "capi/sessions.h"

namespace torch_ckpt::capi {

HandleTable<std::shared_ptr<const Checkpoint>>& Checkpoints() {
  static auto* const table =
      new HandleTable<std::shared_ptr<const Checkpoint>>("opened checkpoint");
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

}  // namespace torch_ckpt::capi
