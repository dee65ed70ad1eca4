"""What may go in a directory of checkpoints: what killed saves, deletions and conversions have
left, checkpoints that are not whole, and old ones. Nothing here needs torch.

Finding writes nothing and holds no save off. Removing looks again, and is then
left to what else does it: `Checkpoint.recover` and `remove`, and those of retention.py, each
under the lock that a save would take. So what a save owns stays, whatever was found a moment ago.

What is no checkpoint of ours, and what bears a name that is none of ours, is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.names import (
    BEST,
    CHILD,
    MANIFEST,
    NEW_POINTERS,
    PART_MANIFEST,
    REMOVED,
    SHARDED,
    STAGE,
    target_of,
)
from torch_ckpt.errors import CheckpointError, ConflictError, IncompleteError
from torch_ckpt.native import core
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.options import local_path
from torch_ckpt.runs.place import (
    linked,
    own_children,
    remove_tree,
    step_named,
    targets_below,
)
from torch_ckpt.runs.retention import delete_child

# Since its last change. A save without collectives holds no lock between the parts of its ranks,
# and where a file system keeps locks to each node, those of other nodes are not seen.
_QUIET_S = 3600.0
_IS_LINKED = "a link leads to it"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A thing that may go.

    path: where it is. what: what it is, in words. bytes: that go with it.
    kept: why it stays all the same; None where it may go.
    finishes: whether the commit of a save is carried out, instead of removing what it staged.
    """

    path: str
    what: str
    bytes: int
    kept: str | None
    finishes: bool
    _act: Callable[[], str | None]

    def remove(self) -> str | None:
        """Remove it, or finish it, if what was found still holds. Returns what of others stays in
        it, in words. Raises ConflictError where it has to stay by now, CheckpointError kinds,
        OSError."""
        return self._act()


def leftovers(path: str | os.PathLike[str], keep_last: int | None = None) -> list[Leftover]:
    """What may go of the checkpoint `path`, or right below a directory of checkpoints.

    keep_last: how many of the newest whole checkpoints `step-<n>` stay; None for all. Links are not
    counted, and what they lead to stays, as does what BEST names.

    A checkpoint of ours that is not whole may go if a whole one of a later step is there, and it
    has not changed for an hour. What cannot be looked at stays, and says why. Raises OSError, and
    CheckpointError kinds for paths that make no sense.
    """
    root = local_path(path)
    if not os.path.isdir(root):
        found = _of_target(root)
        if not found and not os.path.lexists(root):
            raise IncompleteError("there is no such file or directory", file=root)
        if not found:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root)
        return found
    found = _tried(root, partial(_of_target, root))
    whole = own_children(root, _is_whole)  # which looks at no more of them than it has to
    if keep_last is None:
        newest, old = next(whole, (None, ""))[0], set[str]()
    else:
        steps = list(whole)
        best = step_named(root, BEST)
        newest = steps[0][0] if steps else None
        old = {name for step, name in steps[keep_last:] if step != best}
    names = sorted(os.listdir(root))
    for name in names:
        place = os.path.join(root, name)
        if name in old and keep_last is not None:
            found += _tried(place, partial(_old, place, keep_last))
        elif (target := target_of(name)) is None:
            found += _tried(place, partial(_of_name, place, newest))
        elif not os.path.isdir(os.path.join(root, target)):  # else it is looked at itself
            found += _tried(place, partial(_of_target, os.path.join(root, target)))
    return list({each.path: each for each in found}.values())


def _tried(place: str, look: Callable[[], list[Leftover]]) -> list[Leftover]:
    """What `look` finds at `place`, which others may have removed meanwhile. What cannot be looked
    at stays."""
    try:
        return look()
    except FileNotFoundError:
        return []
    except (CheckpointError, OSError) as error:
        kept = str(error)
        return [Leftover(place, "cannot be looked at", 0, kept, False, partial(_stay, kept))]


def _of_name(place: str, newest: int | None) -> list[Leftover]:
    name = os.path.basename(place)
    if REMOVED.fullmatch(name):
        what = "a checkpoint whose deletion was interrupted"
        return [_leftover(place, what, partial(remove_tree, place))]
    if name.startswith(NEW_POINTERS):
        pointer = name[1:].partition(".")[0]
        what, kept = f"a {pointer} that was not finished", _if_recent(place)
        return [_leftover(place, what, partial(_unlinked, place), kept=kept)]
    if name.startswith(".") or not os.path.isdir(place) or os.path.islink(place):
        return []
    return _unfinished(place, newest) or _of_target(place)


def _is_whole(path: str) -> bool:
    """Whether a save of ours is committed at `path` and all its files are what they should be, so
    that others may make way for it."""
    try:
        if not Checkpoint(path).is_committed():
            return False
        OpenedCheckpoint(path).listing(tensors=False, check_files=True)
    except (CheckpointError, OSError):
        return False
    return True


def _leftover(
    path: str,
    what: str,
    act: Callable[[], str | None],
    *,
    kept: str | None = None,
    finishes: bool = False,
) -> Leftover:
    return Leftover(path, what, tree_bytes(path), kept, finishes, act)


def _stay(why: str | None) -> None:
    """Raises ConflictError where there is a reason."""
    if why is not None:
        raise ConflictError(why)


def _of_target(target: str) -> list[Leftover]:
    """What saves into `target` have staged."""
    found = []
    for place in (target, os.path.join(target, SHARDED)):
        if place != target and os.path.islink(place):
            continue  # what it leads to is not ours
        kept = _if_saving(place)
        for each in _staged(place):
            done = each["committed"]
            what = "a commit that was interrupted" if done else "staged by a save that died"
            if kept is not None:
                what = "staged by a save"
            act = partial(_recovered, place)
            finishes = done and kept is None
            found.append(_leftover(each["path"], what, act, kept=kept, finishes=finishes))
    return found


def _staged(target: str) -> list[dict[str, Any]]:
    places: list[dict[str, Any]] = core.call({"op": "staged_places", "path": target})["places"]
    return places


def _if_saving(target: str) -> str | None:
    """Why what is staged for `target` stays: of several places one may be in use."""
    places = _staged(target)
    if any(each["in_use"] for each in places):
        return "the save goes on"
    recent = (_if_recent(each["path"]) for each in places)
    return next((why for why in recent if why is not None), None)


def _recovered(target: str) -> None:
    _stay(_if_saving(target))
    Checkpoint(target).recover()


def _old(place: str, keep_last: int) -> list[Leftover]:
    act = partial(_old_removed, place, keep_last)
    return [_leftover(place, "an old checkpoint", act, kept=_if_old_stays(place))]


def _if_old_stays(path: str) -> str | None:
    """Why an old checkpoint stays: a link leads to it, or a save stages in it or in what stands in
    it."""
    root, name = os.path.split(path)
    if name in linked(root):
        return _IS_LINKED
    for target in (path, *targets_below(path)):
        if (why := _if_saving(target)) is not None:
            inside = os.path.relpath(target, path)
            return why if target == path else f"{inside} in it: {why}"
    return None


def _old_removed(path: str, keep_last: int) -> None:
    root, name = os.path.split(path)
    match = CHILD.fullmatch(name)
    later = (step for step, _ in own_children(root, _is_whole) if match and step > int(match[1]))
    if len(list(itertools.islice(later, keep_last))) < keep_last:
        _stay("fewer later checkpoints are whole by now")
    _stay(_if_old_stays(path))
    delete_child(path)


def _unfinished(path: str, newest: int | None) -> list[Leftover]:
    """The directory `path` where it is a checkpoint of ours that is not whole."""
    if not _is_ours(path) or Checkpoint(path).is_committed():
        return []
    act = partial(_unfinished_removed, path)
    kept = _if_unfinished_stays(path, newest)
    return [_leftover(path, "a checkpoint that is not whole", act, kept=kept)]


def _if_unfinished_stays(path: str, newest: int | None) -> str | None:
    match = CHILD.fullmatch(os.path.basename(path))
    if any(each["in_use"] for each in _staged(path)):
        return "a save goes on"
    if match is None or newest is None or int(match[1]) > newest:
        return "no whole checkpoint of a later step is there"
    if os.path.basename(path) in linked(os.path.dirname(path)):
        return _IS_LINKED
    for entry in _below(path, strict=True):
        if entry.is_symlink() and not os.path.exists(entry.path):
            name = os.path.relpath(entry.path, path)
            return f"{name} leads nowhere; its storage may not be mounted"
    return _if_recent(path)


def _is_ours(path: str) -> bool:
    """Whether torch_ckpt has written the checkpoint in directory `path`, or has begun to; an empty
    child is what a killed removal leaves."""
    names = os.listdir(path)
    if not names:
        return CHILD.fullmatch(os.path.basename(path)) is not None
    return any(
        name == MANIFEST or PART_MANIFEST.fullmatch(name) or name.startswith(f"{STAGE}-")
        for name in names
    )


def _unfinished_removed(path: str) -> str | None:
    newest, _ = next(own_children(os.path.dirname(path), _is_whole), (None, ""))
    _stay(_if_unfinished_stays(path, newest))
    checkpoint = Checkpoint(path)
    checkpoint.recover()
    # From here to the lock that `remove` takes a whole save would have to begin and to commit.
    if checkpoint.is_committed():
        _stay("it has become whole")
    with contextlib.suppress(IncompleteError):  # only parts that were staged, which are gone
        checkpoint.remove()
    try:
        os.rmdir(path)
    except OSError:
        left = sorted(os.listdir(path)) if os.path.lexists(path) else []
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        return f"{', '.join(left[:3])}{more} of others stays" if left else None
    return None


def _unlinked(path: str) -> None:
    _stay(_if_recent(path))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def tree_bytes(path: str) -> int:
    """Bytes of the file `path`, or of all files below it. What goes meanwhile, and what cannot be
    looked at, does not count."""
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not os.path.isdir(path) or os.path.islink(path):
            return os.lstat(path).st_size
    for entry in _below(path, strict=False):
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _if_recent(path: str) -> str | None:
    """Why `path` stays, where somebody may be writing it still."""
    latest = os.lstat(path).st_mtime
    for entry in _below(path, strict=True):
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, entry.stat(follow_symlinks=False).st_mtime)
    seconds = time.time() - latest
    if seconds >= _QUIET_S:
        return None
    return f"it changed {max(0, int(seconds // 60))} minutes ago, somebody may be writing it"


def _below(path: str, *, strict: bool) -> Iterator[os.DirEntry[str]]:
    """All that is below `path`, however deep. What cannot be looked at is an error if `strict`,
    else it is passed over; so is what goes meanwhile."""
    folders = [path]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                found = list(entries)
        except OSError as error:
            if strict and not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise
            continue
        folders += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        yield from found
