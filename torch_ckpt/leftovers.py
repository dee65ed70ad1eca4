"""What may go in a directory of checkpoints: what killed saves, deletions and conversions have
left, checkpoints that are not whole, and old ones. Nothing here needs torch.

Finding writes nothing and holds no save off. Removing is left to what else does it:
`Checkpoint.recover` and `remove`, and the deletions of children.py, each under the lock that a save
would take. So what a save owns stays, whatever was found a moment ago.

What is no checkpoint of ours, and what bears a name that is none of ours, is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch_ckpt import _core
from torch_ckpt.checkpoint import Checkpoint
from torch_ckpt.children import (
    CHILD,
    NEW_LATEST,
    REMOVED,
    SHARDED,
    child_name,
    delete_child,
    newest_first,
    remove_tree,
)
from torch_ckpt.errors import CheckpointError, IncompleteError
from torch_ckpt.jobs import OpenedCheckpoint
from torch_ckpt.options import local_path

CONVERSION = ".torch_ckpt-convert-"  # how the names of the directories begin that it stages in

PART = re.compile(r"torch_ckpt-[0-9]{5,}-of-[0-9]{5,}\.json")
_BESIDE = re.compile(r"\.(.+)\.torch_ckpt-stage")
# Since its last change: a save without collectives holds no lock between the parts of its ranks.
_QUIET_S = 3600.0


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
    _act: Callable[[], bool]

    def remove(self) -> bool:
        """Remove it, or finish it. False where something was there that had to stay. Raises
        ConflictError where a save has begun to use it, CheckpointError kinds, OSError."""
        return self._act()


def leftovers(path: str | os.PathLike[str], keep_last: int | None = None) -> list[Leftover]:
    """What may go of the checkpoint `path`, or right below a directory of checkpoints.

    keep_last: how many of the newest whole checkpoints `step-<n>` stay; None for all.

    A checkpoint of ours that is not whole may go if a whole one of a later step is there, and it
    has not changed for an hour. Raises OSError, and CheckpointError kinds for paths that make no
    sense.
    """
    root = local_path(path)
    found = list(_of_target(root))
    if not os.path.isdir(root):
        if not found and not os.path.lexists(root):
            raise IncompleteError("there is no such file or directory", file=root)
        return found
    names = sorted(os.listdir(root))
    steps = [
        step for step in newest_first(root) if _opens(os.path.join(root, child_name(root, step)))
    ]
    old = {child_name(root, step) for step in steps[keep_last:]} if keep_last is not None else set()
    for name in names:
        place = os.path.join(root, name)
        if REMOVED.fullmatch(name):
            what = "a checkpoint whose deletion was interrupted"
            found.append(_leftover(place, what, partial(_tree_removed, place)))
        elif name.startswith(NEW_LATEST):
            what, kept = "a LATEST that was not finished", _if_recent(place)
            found.append(_leftover(place, what, partial(_unlinked, place), kept=kept))
        elif name.startswith(CONVERSION):
            found += _of_conversion(place)
        elif match := _BESIDE.fullmatch(name):
            if match[1] not in names:
                found += _of_target(os.path.join(root, match[1]))
        elif name in old and not os.path.islink(place):
            what = "an old checkpoint"
            found.append(_leftover(place, what, partial(_deleted, place)))
        elif not name.startswith(".") and os.path.isdir(place) and not os.path.islink(place):
            newest = steps[0] if steps else None
            found += _unfinished(place, newest) or _of_target(place)
    return list({each.path: each for each in found}.values())


def _opens(path: str) -> bool:
    """Of a checkpoint that is committed: whether it can be read, so that older ones may make way
    for it."""
    try:
        OpenedCheckpoint(path)
    except CheckpointError:
        return False
    return True


def _leftover(
    path: str,
    what: str,
    act: Callable[[], bool],
    *,
    kept: str | None = None,
    finishes: bool = False,
) -> Leftover:
    return Leftover(path, what, tree_bytes(path), kept, finishes, act)


def _of_target(target: str) -> Iterator[Leftover]:
    """What saves into `target` have staged."""
    for place in (target, os.path.join(target, SHARDED)):
        places = _core.call({"op": "staged_places", "path": place})["places"]
        in_use = any(each["in_use"] for each in places)
        for each in places:
            done = each["committed"]
            what = "a commit that was interrupted" if done else "staged by a save that died"
            kept = None
            if in_use:
                what, kept = "staged by a save", "the save goes on"
            act = Checkpoint(place).recover
            yield _leftover(each["path"], what, act, kept=kept, finishes=done and not in_use)


def _unfinished(path: str, newest: int | None) -> list[Leftover]:
    """The directory `path` where it is a checkpoint of ours that is not whole."""
    if not _is_ours(path) or Checkpoint(path).is_committed():
        return []
    places = _core.call({"op": "staged_places", "path": path})["places"]
    match = CHILD.fullmatch(os.path.basename(path))
    kept = None
    if any(each["in_use"] for each in places):
        kept = "a save goes on"
    elif match is None or newest is None or int(match[1]) > newest:
        kept = "no whole checkpoint of a later step is there"
    else:
        kept = _if_recent(path)
    what = "a checkpoint that is not whole"
    return [_leftover(path, what, partial(_removed_unfinished, path), kept=kept)]


def _is_ours(path: str) -> bool:
    """Whether torch_ckpt has written the checkpoint in directory `path`, or has begun to; an empty
    child is what a killed removal leaves."""
    names = os.listdir(path)
    if not names:
        return CHILD.fullmatch(os.path.basename(path)) is not None
    return any(
        name == "torch_ckpt.json" or PART.fullmatch(name) or name.startswith(".torch_ckpt-stage-")
        for name in names
    )


def _removed_unfinished(path: str) -> bool:
    checkpoint = Checkpoint(path)
    checkpoint.recover()
    if checkpoint.is_committed():
        return False  # it has become one meanwhile
    with contextlib.suppress(IncompleteError):  # only parts that were staged, which are gone
        checkpoint.remove()
    with contextlib.suppress(OSError):  # what others have put there stays
        os.rmdir(path)
    return not os.path.lexists(path)


def _deleted(path: str) -> bool:
    delete_child(path)
    return True


def _tree_removed(path: str) -> bool:
    remove_tree(path)
    return True


def _unlinked(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return True


def _of_conversion(path: str) -> list[Leftover]:
    held = _lock_of_conversion(path, fcntl.LOCK_SH)
    if held is not None:
        os.close(held)
    kept = "the conversion goes on, or it is none of ours" if held is None else None
    what = "staged by a conversion" if kept else "staged by a conversion that died"
    return [_leftover(path, what, partial(remove_dead_conversion, path), kept=kept)]


def remove_dead_conversion(staging: str) -> bool:
    """Remove the staging directory of a conversion (archives.py) whose process is gone; False if it
    lives, or the directory is none of ours."""
    held = _lock_of_conversion(staging, fcntl.LOCK_EX)
    if held is None:
        return False
    try:
        shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(held)
    return not os.path.lexists(staging)


def _lock_of_conversion(staging: str, lock: int) -> int | None:
    """A descriptor with the lock that the process of a conversion holds; None where it does."""
    try:
        held = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, lock | fcntl.LOCK_NB)
        if set(os.listdir(held)) <= {"layout", "filled"}:
            return held
    except OSError:
        pass
    os.close(held)
    return None


def tree_bytes(path: str) -> int:
    """Bytes of the file `path`, or of all files below it. What goes meanwhile does not count."""
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not os.path.isdir(path) or os.path.islink(path):
            return os.lstat(path).st_size
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _if_recent(path: str) -> str | None:
    """Why `path` stays, where somebody may be writing it still."""
    seconds = time.time() - _changed(path)
    if seconds >= _QUIET_S:
        return None
    return f"it changed {max(0, int(seconds // 60))} minutes ago, a save may be going on"


def _changed(path: str) -> float:
    """When `path`, or something below it, was changed last, in seconds since 1970."""
    latest = os.lstat(path).st_mtime
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                latest = max(latest, os.lstat(os.path.join(folder, name)).st_mtime)
    return latest
