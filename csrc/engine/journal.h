// The journal of a commit into a directory that holds files already.
//
// While T/.torch_ckpt-stage/commit.json stands, it is the manifest, and each
// file is in staging or, renamed, in T. Replaying is idempotent: it may be
// killed anywhere and started again by any later save or `recover`.
#pragma once

#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// Makes the journal durable: after this returns ok the save is committed.
// After an error it is not known whether it is: `committed` says if the rename
// of the journal was reached, and then nothing may be cleaned up.
Status WriteJournal(const Directory& staging, const Directory& target,
                    const Journal& journal, bool* reached);

// Carries out a committed journal, if there is one, and removes it. Leaves
// other files of the staging directory alone.
Status ReplayJournal(const Directory& staging, const Directory& target);

}  // namespace torch_ckpt
