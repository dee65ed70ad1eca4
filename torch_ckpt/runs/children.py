"""The children of a CheckpointDirectory on disk. Nothing here needs torch.

    root/step-<n>     the checkpoint of step n; one with zeros before n, of another tool, counts too
    root/LATEST       the name of the newest one and a line break, for other tools, and for nodes
                      to which a file system still shows what root held some seconds ago
    root/.step-<n>.torch_ckpt-removed-<id>   one that is being deleted
    root/.step-<n>.torch_ckpt-stage          of a save that is going on, or of one that died
    root/.LATEST.torch_ckpt-new-<id>         the next LATEST

What happens after a save, all on rank 0, and what a kill leaves:

1. The save commits step-<n> (docs/design.md). Only what is committed counts.
2. LATEST is written under another name, synced and renamed, and root is synced. A kill before the
   rename leaves it behind, so it only adds to what root lists.
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
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch_ckpt.checkpoint.checkpoint import Checkpoint, locked, was_committed
from torch_ckpt.errors import ConflictError, InvalidArgumentError, UnsupportedError, warn

CHILD = re.compile(r"step-([0-9]+)")
REMOVED = re.compile(r"\.step-[0-9]+\.torch_ckpt-removed-[0-9a-f]+")
_STAGING = re.compile(r"\.(step-([0-9]+))\.torch_ckpt-stage")
_LATEST = "LATEST"
_MOST_OF_A_NAME = 256  # bytes
NEW_LATEST = f".{_LATEST}.torch_ckpt-new-"
BESIDE = re.compile(r"\.(.+)\.torch_ckpt-stage")  # where a save into what is not there stages
SHARDED = "sharded"  # where stock's enable_consolidation puts the shards


def make_directory(path: str) -> None:
    """Make `path` and all above it, durably."""
    if not os.path.lexists(path):
        parent = os.path.dirname(path)
        make_directory(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        _sync(parent)
    if not os.path.isdir(path):
        raise InvalidArgumentError("is not a directory", file=path)


def child_name(root: str, step: int) -> str:
    """The name of the checkpoint of `step` in `root`, or what it would be."""
    name = f"step-{step}"
    if not os.path.lexists(os.path.join(root, name)):
        for other in sorted(os.listdir(root) if os.path.isdir(root) else ()):
            match = CHILD.fullmatch(other)
            if match and int(match[1]) == step:
                return other
    return name


def newest_first(root: str) -> Iterator[int]:
    """The steps of the committed children, highest first; also of one that has lost a file since,
    which is an error for who loads it. Looks no further than it is asked."""
    names = _names_by_step(root)
    for step in sorted(names, reverse=True):
        if was_committed(os.path.join(root, names[step])):
            yield step


def _names_by_step(root: str) -> dict[int, str]:
    """As `child_name` has them, of all steps by one listing."""
    # A listing may be as old as the caches of a network file system let it be; a file is read as it
    # is on the server.
    names: dict[int, str] = {}
    for name in [*sorted(os.listdir(root)), _read_latest(root)]:
        if match := CHILD.fullmatch(name):
            step = int(match[1])
            if step not in names or name == f"step-{step}":
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


def _read_latest(root: str) -> str:
    """What LATEST says; nothing where there is no such file, or one that is being replaced."""
    try:
        fd = os.open(os.path.join(root, _LATEST), os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
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


def check_latest(root: str) -> None:
    """Raise InvalidArgumentError where LATEST cannot be written when a save is committed."""
    place = os.path.join(root, _LATEST)
    if os.path.isdir(place) and not os.path.islink(place):
        raise InvalidArgumentError(
            "is a directory, and a CheckpointDirectory keeps a file of this name, which names the "
            "newest checkpoint; move it elsewhere",
            file=place,
        )


def write_latest(root: str, step: int) -> None:
    """Make LATEST name the checkpoint of `step`, at once and durably. One thread at a time."""
    for name in os.listdir(root):
        if name.startswith(NEW_LATEST):  # of a process that was killed
            _unlink(os.path.join(root, name))
    new = os.path.join(root, NEW_LATEST + secrets.token_hex(8))
    write_durably(os.path.join(root, _LATEST), f"{child_name(root, step)}\n", new)


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
    _sync(os.path.dirname(path))


class Deletions:
    """What rank 0 deletes in directory `root`, one thing after another on a thread of its own.

    The thread is not a daemon: the interpreter waits for it at its end. All methods may be called
    from any thread. A forked child has none of its parent's deletions.
    """

    def __init__(self, root: str, keep: int | None) -> None:
        self._root = root
        self._keep = keep
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._error: Exception | None = None
        self._saving: set[int] = set()

    def _leave_parents(self) -> None:
        if self._pid != os.getpid():
            self._start_anew()

    def spare(self, step: int) -> None:
        """A save of `step` is about to begin: what it stages is not what a dead one has left, until
        it is committed. Waits for a deletion whose lock it could meet."""
        self._leave_parents()
        with self._mutex:
            self._saving.add(step)
        name = child_name(self._root, step)
        if any(
            os.path.lexists(os.path.join(self._root, each))
            for each in (name, f".{name}.torch_ckpt-stage")
        ):
            self.wait()

    def begin(self, step: int) -> None:
        """`step` is committed: delete what that makes too old."""
        self._leave_parents()
        with self._mutex:
            self._saving.discard(step)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch_ckpt-delete")
            try:
                self._last = self._executor.submit(self._run, step)
                return
            except RuntimeError:
                pass  # no thread is to be had, as when the interpreter is about to end
        self._run(step)

    def wait(self) -> None:
        """Until all that has begun is through."""
        self._leave_parents()
        last = self._last
        if last is not None:
            wait([last])

    def close(self) -> None:
        self._leave_parents()
        with self._mutex:
            executor, self._executor, self._last = self._executor, None, None
        if executor is not None:
            executor.shutdown()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, step: int) -> None:
        """All that can be deleted is, even where something cannot. Every run tries everything, so
        that the errors of earlier ones do not count any more."""
        first: Exception | None = None
        try:
            names = os.listdir(self._root)
            leftovers = [name for name in names if REMOVED.fullmatch(name)]
            with self._mutex:
                dead = [
                    match[1]
                    for match in map(_STAGING.fullmatch, names)
                    if match and int(match[2]) <= step and int(match[2]) not in self._saving
                ]
            old: list[str] = []
            if self._keep is not None:
                whole = own_children(self._root, lambda path: Checkpoint(path).is_committed())
                spared = linked(self._root)
                old = [name for number, name in whole if number <= step][self._keep :]
                old = [name for name in reversed(old) if name not in spared]
        except Exception as error:
            first, leftovers, dead, old = error, [], [], []
        for work, what in [
            *((remove_tree, os.path.join(self._root, name)) for name in leftovers),
            *((_remove_staged, os.path.join(self._root, name)) for name in dead),
            *((delete_child, os.path.join(self._root, name)) for name in old),
        ]:
            try:
                work(what)
            except Exception as error:
                first = first or error
        self._error = first
        if first is not None:
            warn(
                f"{self._root}: an old checkpoint could not be deleted; the next save tries "
                f"again: {first}"
            )


def delete_child(path: str) -> None:
    """Delete the checkpoint at `path` with all that stands in it."""
    if os.path.islink(path):
        return  # what it points to is not ours
    root, name = os.path.split(path)
    hidden = os.path.join(root, f".{name}.torch_ckpt-removed-{secrets.token_hex(8)}")
    with contextlib.ExitStack() as locks:
        if os.path.isdir(path):
            locks.enter_context(locked(path))
            for place in targets_below(path):
                locks.enter_context(locked(place))
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return  # somebody else has deleted it
        _sync(root)
    remove_tree(hidden)


def targets_below(path: str) -> list[str]:
    """What in the checkpoint at `path` saves have locks of their own for: where they stage right
    below it, as an export that stands in it, and its shards, with which consolidating saves begin.
    No link is followed."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            if match := BESIDE.fullmatch(entry.name):
                found.append(os.path.join(path, match[1]))
            elif entry.is_dir(follow_symlinks=False) and (
                entry.name == SHARDED
                or any(name.startswith(".torch_ckpt-stage") for name in os.listdir(entry.path))
            ):
                found.append(entry.path)
    return sorted(set(found))


def _remove_staged(path: str) -> None:
    with contextlib.suppress(ConflictError):  # its save goes on
        Checkpoint(path).recover()


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


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
