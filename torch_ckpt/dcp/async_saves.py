"""The async saves of this process: what each one returns, their order, and errors that nobody has
heard of.

A save is registered from its call until it is over, and a failed one until somebody has heard of
it: from its future, from the next save, from `close`, or in a warning when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import warnings
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torch_ckpt.dcp.agreement import rank_0_decides
from torch_ckpt.dcp.commit import Phases
from torch_ckpt.errors import CheckpointError, ConflictError, InvalidArgumentError

OnBusy = Literal["wait", "raise", "overlap"]
OnFailure = Literal["raise", "warn"]


@dataclass(slots=True)
class SaveStats:
    """Times in seconds and bytes of one async save, as this rank has seen it; None where it is not
    known (yet). A planner, writer or stager that is not ours does not tell.

    started: when it was called, in seconds since 1970.
    waited_s: for earlier saves, before anything else.
    staged_s, staged_bytes: the copy into host memory.
    blocked_s: the whole call of `async_save`.
    planned_s: from the beginning of the save in the background until this rank began to write.
    written_s, written_bytes: this rank's files, durable.
    ring_bytes, parts_bytes: how what is sharded in short rows went into final files, see Phases.
    committed_s: what the coordinator did after the last rank had written.
    total_s: from the call until the save was over.
    """

    path: str
    rank: int
    world_size: int
    started: float
    error: str | None = None
    waited_s: float | None = None
    staged_s: float | None = None
    staged_bytes: int | None = None
    blocked_s: float | None = None
    planned_s: float | None = None
    written_s: float | None = None
    written_bytes: int | None = None
    ring_bytes: int | None = None
    parts_bytes: int | None = None
    committed_s: float | None = None
    total_s: float | None = None


class AsyncSave(Future[Any], AsyncSaveResponse):
    """A save that goes on in the background: the future of its upload, and stock's response with
    both futures, whichever of the two a caller expects.

    result(), exception(): wait until the checkpoint is committed, or the save has failed. The
        result is DCP's Metadata; None for a failure with on_failure="warn".
    staging_completion: a future; when it is done the trainer may change its tensors.
    upload_completion: this object.
    stats: SaveStats, complete when the save is over.
    error: what it failed with, or None.
    """

    def __init__(
        self, stats: SaveStats, on_failure: OnFailure = "raise", log_path: str | None = None
    ) -> None:
        Future.__init__(self)
        self.staging_completion: Future[None] = Future()
        for future in (self, self.staging_completion):
            future.set_running_or_notify_cancel()  # there is no way back
        self.stats = stats
        self.error: BaseException | None = None
        self._uses: list[Any] = []
        self._finishing = threading.Lock()
        self._log_path = log_path
        self._began = time.perf_counter()
        self._on_failure = on_failure
        self._heard = False
        self._pid = os.getpid()

    # By identity, as futures are, and not by its fields, as a response.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def upload_completion(self) -> AsyncSave:  # type: ignore[override]
        return self

    def result(self, timeout: float | None = None) -> Any:
        self._is_ours()
        try:
            return Future.result(self, timeout)
        except BaseException as error:
            if error is self.error:
                self.told()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._is_ours()
        error = Future.exception(self, timeout)
        self.told()
        return error

    def _is_ours(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise InvalidArgumentError(
                f"the save into {self.stats.path} belongs to the parent of this forked process"
            )

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def release_tensors(self, error: BaseException | None = None) -> None:
        """The tensors may change; or, with an error, were not read. The first call counts."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.staging_completion.set_result(None)
            else:
                self.staging_completion.set_exception(error)

    def count(self, metadata: Any) -> None:
        """Take the phases of the save, which our writer has left in what DCP returns."""
        phases = metadata.storage_data
        mine = phases.get(self.stats.rank) if isinstance(phases, dict) else None
        if isinstance(mine, Phases):
            self.stats.planned_s = mine.planned_s
            self.stats.written_s = mine.written_s
            self.stats.written_bytes = mine.written_bytes
            self.stats.ring_bytes = mine.ring_bytes
            self.stats.parts_bytes = mine.parts_bytes
            self.stats.committed_s = mine.committed_s

    def finish(self, metadata: Any, error: BaseException | None) -> None:
        """The save is over. The first call counts."""
        with self._finishing:
            if self.done():
                return
            self.stats.total_s = self.elapsed()
            self.error = error
            if error is not None:
                self.stats.error = str(error) or type(error).__name__
            log = None if self._log_path is None else _log(self._log_path, self.stats)
            self._uses = []
            self.release_tensors()
            warns = error is not None and self._on_failure == "warn"
            if warns:
                self.told()
            if error is None or warns:
                self.set_result(metadata)
            else:
                self.set_exception(error)
        _known()  # or the register would keep it
        # Last: where warnings are errors, these raise.
        if warns:
            _warn(f"the save into {self.stats.path} failed: {error}")
        if log is not None:
            _warn(f"no line in the log of saves: {log}")

    def told(self) -> None:
        """Its caller has heard, or will have, why it fails."""
        self._heard = True

    def is_unheard(self) -> bool:
        return self.done() and self.error is not None and not self._heard

    def hear(self) -> BaseException | None:
        """The error, if nobody has heard of it yet."""
        if not self.is_unheard():
            return None
        self.told()
        return self.error


_beginning = threading.Lock()  # of two threads that call at once, one sees the other's save
_mutex = threading.Lock()
_saves: list[AsyncSave] = []  # in the order of their calls


def _known() -> list[AsyncSave]:
    with _mutex:
        _saves[:] = [save for save in _saves if not save.done() or save.is_unheard()]
        return list(_saves)


def running() -> list[AsyncSave]:
    """The saves that are not over, in the order of their calls."""
    return [save for save in _known() if not save.done()]


class Turn:
    """That a save may begin.

    earlier: the saves beside which it is staged. They are over before it uses the process group.
    running: all that were running when it was called.
    """

    def __init__(
        self, save: AsyncSave, known: list[AsyncSave], heard: str, *, overlaps: bool, timeout: float
    ) -> None:
        self.running = known
        self.earlier = known if overlaps else []
        self._save = save
        self._heard = heard
        self._timeout = timeout

    def wait(self) -> None:
        """Until it may be staged. Raises ConflictError; on this rank alone, where others of its own
        are late."""
        if not self.earlier:
            wait_for(self.running, self._timeout)
        self._save.stats.waited_s = self._save.elapsed()
        if self._heard != "":
            _warn(self._heard)


def begin(
    save: AsyncSave,
    group: dist.ProcessGroup | None,
    on_busy: OnBusy,
    uses: list[Any],
    timeout: float,
) -> Turn:
    """Register `save`, which uses the objects `uses`, if it may begin.

    Rank 0 says for all whether it may; so the others wait for it. Raises, on all alike,
    ConflictError where other saves are running, CheckpointError where nobody has heard yet that an
    earlier one failed.
    """
    save._uses = [used for used in uses if used is not None]
    with _beginning:
        return _begin(save, group, on_busy, timeout)


def _begin(
    save: AsyncSave, group: dist.ProcessGroup | None, on_busy: OnBusy, timeout: float
) -> Turn:
    known = running()
    if on_busy == "overlap" and any(
        used is other for earlier in known for used in earlier._uses for other in save._uses
    ):
        on_busy = "wait"

    def decide() -> dict[str, str]:
        return _verdict(on_busy, save._on_failure, timeout)

    verdict = (
        rank_0_decides(group, "begin", decide, timeout=timeout + 60)
        if save.stats.world_size > 1
        else decide()
    )
    if "busy" in verdict:
        raise ConflictError(verdict["busy"], rank=save.stats.rank)
    if on_busy != "overlap":
        # Rank 0 may be ahead. `Turn.wait` looks what came of it, where other ranks hear of that.
        wait(known, timeout)
    heard, error = _hear()
    if "failed" in verdict:
        raise CheckpointError(verdict["failed"], rank=save.stats.rank) from error
    with _mutex:
        _saves.append(save)
    # Heard of in a warning: on_failure="warn", or rank 0 has heard of it before.
    return Turn(save, known, heard, overlaps=on_busy == "overlap", timeout=timeout)


def _verdict(on_busy: OnBusy, on_failure: OnFailure, timeout: float) -> dict[str, str]:
    """Why rank 0 would not begin a save now: {"busy": text} or {"failed": text}; {} if it would."""
    if on_busy == "wait":
        try:
            wait_for(running(), timeout)
        except ConflictError as error:
            return {"busy": error.message}
    elif on_busy == "raise" and running():
        return {"busy": f"{_BUSY}, into {running()[0].stats.path}"}
    failed = _failures() if on_failure == "raise" else ""
    return {"failed": failed} if failed != "" else {}


_BUSY = "another save is going on"


def _failures() -> str:
    """What nobody has heard of; empty if there is nothing."""
    return "; ".join(
        f"an earlier save, into {known.stats.path}, failed: {known.error}"
        for known in _known()
        if known.is_unheard()
    )


def _hear() -> tuple[str, BaseException | None]:
    """`_failures`, and the first of the errors; now all have been heard of."""
    text = _failures()
    errors = [known.hear() for known in _known() if known.is_unheard()]
    return text, errors[0] if errors else None


def wait_for(saves: list[AsyncSave], timeout: float | None) -> None:
    """Wait until all of `saves` are over. Raises ConflictError after `timeout` seconds."""
    wait(saves, timeout)
    late = [save for save in saves if not save.done()]
    if late:
        path = late[0].stats.path
        raise ConflictError(f"{_BUSY}, into {path}, and did not end within {timeout} seconds")


def close(timeout: float | None = None) -> None:
    """Wait until the saves of this process are over; then raise a CheckpointError for those that
    failed and that nobody has heard of."""
    wait_for(running(), timeout)
    text, error = _hear()
    if error is not None:
        raise CheckpointError(text) from error


def _log(path: str, stats: SaveStats) -> OSError | None:
    """Append one line. A log that cannot be written is no reason to fail a save."""
    line = json.dumps(asdict(stats)) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())  # at once, or lines of ranks would mix
        finally:
            os.close(descriptor)
    except OSError as error:
        return error
    return None


def _warn(message: str) -> None:
    warnings.warn(f"torch_ckpt: {message}", RuntimeWarning, stacklevel=2)


@atexit.register
def _name_the_unheard() -> None:
    # Threads that save have been joined: what is not over now will not be.
    for save in _known():
        outcome = f"failed: {save.error}" if save.done() else "was not over"
        _warn(f"the save into {save.stats.path} {outcome}")


def _forget_parents() -> None:
    global _beginning, _mutex
    _beginning, _mutex = threading.Lock(), threading.Lock()  # the parent's may be held for ever
    _saves.clear()


os.register_at_fork(after_in_child=_forget_parents)
