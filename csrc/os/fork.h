// What a fork leaves behind: the child has the parent's memory, but none of its
// threads, so that a mutex may be held for ever by a thread that is not there.
#pragma once

#include "base/status.h"

namespace torch_ckpt {

// True in a process that was forked from one that had used the core, by a call
// of NotInForkedChild: one that has only loaded it, as an import beside torch
// does, leaves nothing behind.
bool InForkedChild();

// kUnsupported there, saying what to do instead; ok in any other process. To
// be asked before a lock is taken.
Status NotInForkedChild();

}  // namespace torch_ckpt
