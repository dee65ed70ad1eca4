"""Save sessions: holds on what a save has staged, as jobs.py holds jobs."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Literal

from torch_ckpt.errors import InvalidArgumentError, warn
from torch_ckpt.native import core
from torch_ckpt.native.jobs import apart, caller, finalizer


def warn_of(answer: dict[str, Any]) -> None:
    """Warn of what the engine has found and given up while it did what `answer` tells. Called when
    all that must be kept of the answer is kept: where warnings are errors, the first one raises."""
    for text in answer.get("warnings", ()):
        warn(f"torch_ckpt: {text}")


class _Session:
    """A hold on a staging directory, from planning to the commit.

    DCP gives a writer no call when a save fails elsewhere. So a session remembers the thread that
    began it: that thread beginning another save, or being gone, means that this save is over.
    """

    _kind: str  # as the core's requests are named
    _open: dict[tuple[str, str], weakref.ref[_Session]] = {}
    _mutex = threading.Lock()

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path = path
        self._thread = caller()
        self.end_earlier(path)
        # Not under the lock: this is work on the disk, and others begin elsewhere.
        answer = apart(
            lambda: core.call({"op": f"begin_{self._kind}", "path": path, **options}),
            lambda: None,
            lambda begun: end_session(self._kind, begun["session"]),
        )
        self.id: int = answer["session"]
        self.staging: str = answer["staging"]
        self.save_id: str = answer["save_id"]
        self._finalizer = finalizer(self, end_session, self._kind, self.id)
        with _Session._mutex:
            _Session._open[self._kind, path] = weakref.ref(self)
        warn_of(answer)

    @classmethod
    def end_earlier(cls, path: str) -> None:
        """End what a save into `path` that is over has left open in this process."""
        with _Session._mutex:
            known = _Session._open.get((cls._kind, path))
            earlier = known() if known is not None else None
        if earlier is not None and earlier._is_over():
            earlier.end()

    def __reduce__(self) -> Any:
        raise TypeError("a save session cannot be pickled")

    def _is_over(self) -> bool:
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Commit what `request` names (engine/commit/commit.h). On failure the session ends."""
        try:
            answer: dict[str, Any] = core.call(
                {"op": f"commit_{self._kind}", "session": self.id, **request}
            )
        except BaseException:
            self.end()
            raise
        self._finalizer.detach()
        self._forget()
        warn_of(answer)
        return answer

    def end(self) -> None:
        """Give up: remove the staging directory and release its lock. Twice is fine."""
        self._finalizer()
        self._forget()

    def _forget(self) -> None:
        key = (self._kind, self.path)
        known = _Session._open.get(key)
        if known is not None and known() is self:
            _Session._open.pop(key, None)


def replaces(overwrite: bool | Literal["all"]) -> dict[str, bool]:
    """`overwrite` in the words of the core's requests."""
    return {"overwrite": bool(overwrite), "others": overwrite == "all"}


class SaveSession(_Session):
    """The coordinator's hold on the staging directory of a save."""

    _kind = "save"

    def __init__(
        self,
        path: str,
        *,
        overwrite: bool | Literal["all"],
        shard_ranks: int = 0,
        shards_in: str = "",
    ) -> None:
        """Begin a save into directory `path`. Raises ConflictError when another one is going on,
        when there is what `overwrite` (of HuggingFaceStorageWriter) does not replace, and with
        `shard_ranks`, how many are to write shards into the subdirectory `shards_in` (""
        for none), when a file of others there would be read instead of them."""
        shards = {"shard_ranks": shard_ranks, "subdirectory": shards_in}
        super().__init__(path, {**replaces(overwrite), **shards})

    def stage_extras(self, paths: list[str], subdirectory: str = "") -> list[dict[str, Any]]:
        """Copy files into staging, for that subdirectory ("": none); returns what the commit needs
        to know of them."""
        request = {"session": self.id, "extras": paths, "subdirectory": subdirectory}
        answer = core.call({"op": "stage_extras", **request})
        return answer["files"]  # type: ignore[no-any-return]

    def stage_final(self, request: dict[str, Any]) -> None:
        """Lay out final files and write their headers into staging (engine/save/final_files.h)."""
        core.call({"op": "stage_final", "session": self.id, **request})


class PartSession(_Session):
    """One rank's hold on its staging directory, in a save without collectives."""

    _kind = "part"

    def __init__(self, path: str, part: dict[str, Any]) -> None:
        """Begin the part `part` (rank, world_size, run_id, sequence) in directory `path`.

        Raises ConflictError when the directory holds anything but parts of the same save.
        """
        super().__init__(path, part)


class ArchiveSession(_Session):
    """A conversion's hold on the directory `staging`, where torch lays out what is to be at `path`,
    for the engine to fill (csrc/engine/merge/fill_archives.h). Raises ConflictError when another
    save to `path` is going on, and for what stands there and is not replaced."""

    _kind = "archives"


def end_session(kind: str, session: int) -> None:
    """Give up session `session` of the core, which may be unknown: a commit has consumed it then,
    and only its answer did not arrive."""
    with contextlib.suppress(InvalidArgumentError):
        core.call({"op": f"end_{kind}", "session": session})


def _new_mutex() -> None:
    _Session._mutex = threading.Lock()  # the parent's may be held for ever


os.register_at_fork(after_in_child=_new_mutex)
