// The journal of a commit into a directory that holds files already.
//
//  1. It is written as <place>/<save id>.new and synced; staging, the place
//     and T are synced, so that all that it names is durable.
//  2. It is renamed to <place>/commit.json, which no file may be called, and
//     the place is synced: the commit point. While it stands it is the
//     manifest, and each file is in staging or, renamed, in T.
//  3. Replay: place, staging and T are synced, since whoever replays need not
//     be who wrote it: its rename may be in memory only, and after the first
//     unlink in T there is no way back. Then the removes are unlinked, with
//     subdirectories that they leave empty, the files renamed into T, whose
//     subdirectories are made, the manifest last; T, all that lies between and
//     staging are synced.
//  4. commit.json is unlinked and the place synced.
//
// Crash argument: what is before 2 changes nothing in T. From then on the
// journal names only what is durable, and goes only when T is durable without
// it. Each operation of step 3 finds its work done or does it: it may be killed
// anywhere and started again by any later save or `recover`.
#pragma once

#include <functional>

#include "format/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// The name of a journal that is not committed.
std::string JournalDraftName(const std::string& save_id);

// Steps 1 and 2. After ok the save is committed. `check` is called right before
// the commit point, and its error is this one's. kConflict when another save
// has superseded this one, or has a journal there. After any other error it is
// not known whether the save is committed; if commit.json stands, it is.
Status WriteJournal(const Directory& root, const Directory& staging,
                    const Directory& target, const Journal& journal,
                    const std::function<Status()>& check);

// Step 3, if there is a committed journal. Its errors mean that the save is
// committed, and readers of ours see it, but that others may see a mixture.
Status ReplayJournal(const Directory& root, const Directory& target);

// Step 4.
Status RemoveJournal(const Directory& root);

}  // namespace torch_ckpt
