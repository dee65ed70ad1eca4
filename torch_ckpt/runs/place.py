"""A directory of checkpoints on disk: what is in it, and what is written there. Nothing here needs
torch.

    root/step-<n>     the checkpoint of step n; one with zeros before n, of another tool, counts too
    root/LATEST       the name of the newest one and a line break, for other tools, and for nodes
                      to which a file system still shows what root held some seconds ago
    root/.step-<n>.torch_ckpt-removed-<id>   one that is being deleted
    root/.step-<n>.torch_ckpt-stage          of a save that is going on, or of one that died
    root/BEST         the same of the best one, where a metric says which that is
    root/.LATEST.torch_ckpt-new-<id>         the next LATEST; so of BEST

What happens after a save, all on rank 0, and what a kill leaves:

1. The save commits step-<n> (docs/design.md). Only what is committed counts.
2. LATEST is written under another name, synced and renamed, and root is synced. A kill before the
   rename leaves it behind, so it only adds to what root lists. Then BEST in the same way.
3. A background thread deletes what is too old: under the lock that a save into it would take, a
   child gets its hidden name, and root is synced; then the tree is removed. A kill leaves the child
   whole, or a hidden name that the next deletion removes: a child is never seen half removed.
4. It also removes what dead saves of earlier steps have staged, since no later save may come to
   these steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator

from torch_ckpt.checkpoint.checkpoint import was_committed
from torch_ckpt.checkpoint.names import (
    CHILD,
    LATEST,
    NEW,
    SHARDED,
    STAGE,
    child_of,
    target_of,
)
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError

_MOST_OF_A_NAME = 256  # bytes


def make_directory(path: str) -> None:
    """Make `path` and all above it, durably."""
    if not os.path.lexists(path):
        parent = os.path.dirname(path)
        make_directory(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_directory(parent)
    if not os.path.isdir(path):
        raise InvalidArgumentError("is not a directory", file=path)


def child_name(root: str, step: int) -> str:
    """The name of the checkpoint of `step` in `root`, or what it would be."""
    name = child_of(step)
    if not os.path.lexists(os.path.join(root, name)):
        for other in sorted(os.listdir(root) if os.path.isdir(root) else ()):
            match = CHILD.fullmatch(other)
            if match and int(match[1]) == step:
                return other
    return name


def newest_first(root: str, counts: Callable[[str], bool] = was_committed) -> Iterator[int]:
    """The steps of the children that `counts` says of their paths, highest first: the committed
    ones, also one that has lost a file since, which is an error for who loads it. Looks no further
    than it is asked."""
    names = _names_by_step(root)
    for step in sorted(names, reverse=True):
        if counts(os.path.join(root, names[step])):
            yield step


def _names_by_step(root: str) -> dict[int, str]:
    """As `child_name` has them, of all steps by one listing."""
    # A listing may be as old as the caches of a network file system let it be; a file is read as it
    # is on the server.
    names: dict[int, str] = {}
    for name in [*sorted(os.listdir(root)), read_pointer(root, LATEST)]:
        if match := CHILD.fullmatch(name):
            step = int(match[1])
            if step not in names or name == child_of(step):
                names[step] = name
    return names


def own_children(root: str, is_whole: Callable[[str], bool]) -> Iterator[tuple[int, str]]:
    """Step and name of the children that `is_whole` says of their paths, highest first, but for
    links: what they lead to is no second checkpoint. Looks no further than it is asked."""
    names = _names_by_step(root)
    for step in sorted(names, reverse=True):
        path = os.path.join(root, names[step])
        if not os.path.islink(path) and is_whole(path):
            yield step, names[step]


def linked(root: str) -> set[str]:
    """Names in `root` that links in it lead to, or into."""
    real = os.path.realpath(root)
    with os.scandir(root) as entries:
        links = [entry.path for entry in entries if entry.is_symlink()]
    return {os.path.relpath(os.path.realpath(link), real).split(os.sep)[0] for link in links}


def read_pointer(root: str, pointer: str) -> str:
    """What LATEST or BEST says; nothing where there is none, or it is being replaced."""
    try:
        fd = os.open(os.path.join(root, pointer), os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ""
            return os.read(fd, _MOST_OF_A_NAME).decode("ascii", "replace").removesuffix("\n")
        finally:
            os.close(fd)
    except OSError as error:
        # Also of a socket, and of a link to itself.
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENXIO, errno.ELOOP):
            return ""
        raise


def step_named(root: str, pointer: str) -> int | None:
    """The step that LATEST or BEST names, be it there or not."""
    match = CHILD.fullmatch(read_pointer(root, pointer))
    return None if match is None else int(match[1])


def check_pointer(root: str, pointer: str) -> None:
    """Raise InvalidArgumentError where LATEST or BEST could not be written after a commit."""
    place = os.path.join(root, pointer)
    if os.path.isdir(place) and not os.path.islink(place):
        raise InvalidArgumentError(
            "is a directory, and a CheckpointDirectory keeps a file of this name, which names "
            "a checkpoint; move it elsewhere",
            file=place,
        )


def write_pointer(root: str, pointer: str, step: int | None) -> None:
    """Make LATEST or BEST name the checkpoint of `step`, at once and durably; None: remove it. One
    thread at a time."""
    place = os.path.join(root, pointer)
    begin = f".{pointer}{NEW}"
    for name in os.listdir(root):
        if name.startswith(begin):  # of a process that was killed
            _unlink(os.path.join(root, name))
    if step is not None:
        new = os.path.join(root, begin + secrets.token_hex(8))
        write_durably(place, f"{child_name(root, step)}\n", new)
    elif os.path.lexists(place):
        _unlink(place)
        sync_directory(root)


def write_durably(path: str, text: str, new: str) -> None:
    """Make the file `path` hold `text`, at once and durably. It is written under the name `new`, in
    the same directory, which nobody else writes."""
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        _unlink(new)
        raise
    sync_directory(os.path.dirname(path))


def targets_below(path: str) -> list[str]:
    """What in the checkpoint at `path` saves have locks of their own for: where they stage right
    below it, as an export that stands in it, and its shards, with which consolidating saves begin.
    No link is followed."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            if target := target_of(entry.name):
                found.append(os.path.join(path, target))
            elif entry.is_dir(follow_symlinks=False) and (
                entry.name == SHARDED
                or any(name.startswith(STAGE) for name in os.listdir(entry.path))
            ):
                found.append(entry.path)
    return sorted(set(found))


def remove_tree(path: str) -> None:
    """Remove the directory `path` and all in it, of which others may remove parts too."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
            try:
                shutil.rmtree(path)
            except RecursionError:
                raise UnsupportedError(
                    "has too many directories in each other to be removed here; use rm -r",
                    file=path,
                ) from None


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_directory(path: str) -> None:
    """Have the names in directory `path` outlive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
