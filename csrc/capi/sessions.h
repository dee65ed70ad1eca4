// Save sessions that Python holds by id.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/parts.h"
#include "engine/staging.h"

namespace torch_ckpt::capi {

// Ids are never reused. All functions may be called from any thread; a session
// that is being committed is out of the table meanwhile.
int64_t KeepSession(std::unique_ptr<SaveSession> session);
// Takes the session out; kInvalidArgument for an unknown id.
Result<std::unique_ptr<SaveSession>> TakeSession(int64_t id);
// Puts it back under the same id, after a commit that failed.
void ReturnSession(int64_t id, std::unique_ptr<SaveSession> session);

// The same for the parts of saves without collectives. Their ids count apart.
int64_t KeepPart(std::unique_ptr<PartSession> part);
Result<std::unique_ptr<PartSession>> TakePart(int64_t id);
void ReturnPart(int64_t id, std::unique_ptr<PartSession> part);

}  // namespace torch_ckpt::capi
