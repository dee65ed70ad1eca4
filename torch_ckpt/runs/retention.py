"""What goes from a directory of checkpoints when there are too many. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch_ckpt.checkpoint.checkpoint import Checkpoint, locked
from torch_ckpt.checkpoint.names import BEST, CHILD, REMOVED, removed, staged_beside, target_of
from torch_ckpt.errors import ConflictError, warn
from torch_ckpt.runs.place import (
    child_name,
    linked,
    own_children,
    remove_tree,
    step_named,
    sync_directory,
    targets_below,
)


def is_committed(path: str) -> bool:
    """Whether a save of ours is committed at `path`."""
    return Checkpoint(path).is_committed()


class Deletions:
    """What rank 0 deletes in directory `root`, one thing after another on a thread of its own.

    keep: how many of the newest checkpoints stay; None for all. keep_every: multiples of it stay
    too. And so does what BEST names. is_whole: says of a child's path whether it is a checkpoint
    that counts, and may go.

    The thread is not a daemon: the interpreter waits for it at its end. All methods may be called
    from any thread. A forked child has none of its parent's deletions.
    """

    def __init__(
        self,
        root: str,
        keep: int | None,
        keep_every: int | None = None,
        is_whole: Callable[[str], bool] = is_committed,
    ) -> None:
        self._root = root
        self._keep = keep
        self._keep_every = keep_every
        self._is_whole = is_whole
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
            os.path.lexists(os.path.join(self._root, each)) for each in (name, staged_beside(name))
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
                    target
                    for target in filter(None, map(target_of, names))
                    if (match := CHILD.fullmatch(target))
                    and int(match[1]) <= step
                    and int(match[1]) not in self._saving
                ]
            old: list[str] = []
            if self._keep is not None:
                whole = own_children(self._root, self._is_whole)
                spared, best = linked(self._root), step_named(self._root, BEST)
                older = [(number, name) for number, name in whole if number <= step][self._keep :]
                old = [
                    name
                    for number, name in reversed(older)
                    if name not in spared and number != best and not self._is_kept(number)
                ]
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

    def _is_kept(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0


def delete_child(path: str) -> None:
    """Delete the checkpoint at `path` with all that stands in it."""
    if os.path.islink(path):
        return  # what it points to is not ours
    root, name = os.path.split(path)
    hidden = os.path.join(root, removed(name, secrets.token_hex(8)))
    with contextlib.ExitStack() as locks:
        if os.path.isdir(path):
            locks.enter_context(locked(path))
            for place in targets_below(path):
                locks.enter_context(locked(place))
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return  # somebody else has deleted it
        sync_directory(root)
    remove_tree(hidden)


def _remove_staged(path: str) -> None:
    with contextlib.suppress(ConflictError):  # its save goes on
        Checkpoint(path).recover()
