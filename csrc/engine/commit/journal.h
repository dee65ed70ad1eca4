// The journal of a commit into a directory that holds files already.
//
//  1. Into its own directory, <place>/<save id>, the save writes the manifest
//     that is to come, `commit.json` (the journal) and an empty directory,
//     gone.<save id>. All is synced, and so are place and T: what the journal
//     names is durable, and nothing that follows needs space.
//  2. <place>/<save id> is renamed to <place>/committed, which no system does
//     while a directory of that name has anything in it, and the place is
//     synced: the commit point. While commit.json stands there it is the
//     manifest, and each file is in `committed` or, renamed, in T.
//  3. Replay:
//     a. Place, `committed` and T are synced, since whoever replays need not be
//        who wrote it: its rename may be in memory only.
//     b. Every file of the journal is found, in `committed` or in T, with its
//        size and id. Else nothing is touched: what the journal promises can
//        not be had, and T is left as it is.
//     c. What goes from T is renamed into gone.<save id>: what the journal
//        says, and what the manifest names that stands in T, if that is a
//        third one. Subdirectories that this leaves empty go.
//     d. The files are renamed into T, whose subdirectories are made and synced
//        before, the manifest last. T, what lies between and `committed` are
//        synced.
//  4. The journal is renamed into gone.<save id> and `committed` synced; what
//     is in `committed` is removed, then the directory, and the place is
//     synced.
//
// Crash argument: what is before 2 changes nothing in T. From then on the
// journal names only what is durable, and goes only when T is durable without
// it. Each operation of step 3 finds its work done or does it: it may be killed
// anywhere and started again by any later save or `recover`.
//
// Of several processes that replay at once, locks or none: each step is a
// rename out of `committed` or into gone.<save id> in it, by an open directory.
// The next commit needs the name `committed`, so it comes after step 4, and
// then that directory is no more: whoever stood still in the middle of a replay
// and goes on finds nothing to rename, and nowhere to rename to. So nobody
// touches what a later save has put into T, and nobody takes away a journal but
// the one that he has carried out.
#pragma once

#include <functional>

#include "format/ours/manifest.h"
#include "os/directory.h"

namespace torch_ckpt {

// Steps 1 and 2. After ok the save is committed. `check` is called right before
// the commit point, and its error is this one's. kConflict when another save
// has superseded this one, or has a journal there. After any other error it is
// not known whether the save is committed: if `committed` is `staging`, it is.
Status WriteJournal(const Directory& place, const Directory& staging,
                    const Directory& target, const Journal& journal,
                    const std::function<Status()>& check);

// Steps 3 and 4, of this process's own journal. After an error that is no
// kConflict the save is committed, and readers of ours see it, but others may
// see a mixture. kConflict: another save has replaced it by now, or had changed
// T so that it could not be carried out; it is withdrawn then. What cannot be
// cleaned up is left to the next save.
Status CarryOut(const Directory& place, const Directory& staging,
                const Directory& target, const Journal& journal);

// The same of whatever journal stands at the place. Whether there was one.
// kIncomplete (3b) and kCorrupt, saying what to do, where it cannot be carried
// out: then it stays. Unless there is `given_up`: it goes, with what is staged,
// and there is the reason.
Result<bool> CarryOutFound(const Directory& place, const Directory& target,
                           Status* given_up = nullptr);

}  // namespace torch_ckpt
