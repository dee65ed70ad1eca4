"""Saves in the background: the future of each, and the register of those of this process.

They are registered from their call until they are over, and failed ones until somebody has heard of
it: from the future, from the next save, from `close`, or in a warning when the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Literal

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torch_ckpt.calls.save import SaveStats, append_to_log
from torch_ckpt.dcp import stager
from torch_ckpt.errors import CheckpointError, ConflictError, InvalidArgumentError
from torch_ckpt.errors import warn as warn_caller

OnFailure = Literal["raise", "warn"]


class AsyncSave(Future[Any], AsyncSaveResponse):
    """A save that goes on in the background: the future of its upload, and stock's response with
    both futures, whichever of the two a caller expects.

    cancel(): ask it to stop.
    result(), exception(): wait until the checkpoint is committed, or the save has failed. The
        result is DCP's Metadata; None for a failure with on_failure="warn".
    staging_completion: a future; when it is done the trainer may change its tensors.
    upload_completion: this object.
    stats: SaveStats, complete when the save is over.
    error: what it failed with, or None.
    """

    def __init__(self, stats: SaveStats, cancel: threading.Event | None = None) -> None:
        Future.__init__(self)
        self.staging_completion: Future[None] = Future()
        for future in (self, self.staging_completion):
            future.set_running_or_notify_cancel()  # there is no way back
        self.stats = stats
        self.error: BaseException | None = None
        self._heard = False  # whether its caller has heard, or will have, why it fails
        self._pid = os.getpid()
        self._cancel = cancel

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
                self._heard_of()
            raise
        finally:
            del self  # or the error would find itself in this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._is_ours()
        error = Future.exception(self, timeout)
        self._heard_of()
        return error

    def cancel(self) -> bool:
        """Ask the save to stop, on all ranks. Returns whether that could be: it was still running,
        and in no process of its own. `result()` then raises CancelledError, and nothing of the save
        is left, unless it was about to be committed."""
        if self._cancel is None or self.done():
            return False
        self._cancel.set()
        return True

    def _heard_of(self) -> None:
        self._heard = True
        known()  # or the register would keep it

    def _is_ours(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise InvalidArgumentError(
                f"the save into {self.stats.path} belongs to the parent of this forked process"
            )


class RunningSave:
    """A save in the background, as those know it who run it. future: what its caller has."""

    def __init__(
        self,
        stats: SaveStats,
        on_failure: OnFailure = "raise",
        log_path: str | None = None,
        uses: tuple[Any, ...] = (),
        cancel: threading.Event | None = None,
    ) -> None:
        """`uses`: what other saves cannot use at the same time. `cancel`: what asks it to stop."""
        self.future = AsyncSave(stats, cancel)
        self.cancel = cancel
        self.stats = stats
        self._uses = tuple(used for used in uses if used is not None)
        self._finishing = threading.Lock()
        self._log_path = log_path
        self._began = time.perf_counter()
        self._on_failure = on_failure

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._began

    def shares_with(self, other: RunningSave) -> bool:
        """Whether both use something that two saves cannot use at the same time."""
        return any(used is theirs for used in self._uses for theirs in other._uses)

    def release_tensors(self, error: BaseException | None = None) -> None:
        """The tensors may change; or, with an error, were not read. The first call counts."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.future.staging_completion.set_result(None)
            else:
                self.future.staging_completion.set_exception(error)

    def finish(self, metadata: Any, error: BaseException | None) -> None:
        """The save is over. The first call counts."""
        future = self.future
        with self._finishing:
            if future.done():
                return
            self.stats.total_s = self.elapsed()
            future.error = error
            if error is not None:
                self.stats.error = str(error) or type(error).__name__
            not_logged = append_to_log(self._log_path, self.stats)
            self._uses = ()
            self.release_tensors()
            warns = error is not None and self._on_failure == "warn"
            if warns:
                self.told()
            if error is None or warns:
                future.set_result(metadata)
            else:
                future.set_exception(error)
        known()  # or the register would keep it
        # Last: where warnings are errors, these raise.
        if warns:
            warn(f"the save into {self.stats.path} failed: {error}")
        if not_logged is not None:
            warn(not_logged)

    def told(self) -> None:
        """Its caller has heard, or will have, why it fails."""
        self.future._heard_of()

    def is_over(self) -> bool:
        return self.future.done()

    def is_unheard(self) -> bool:
        return self.is_over() and self.future.error is not None and not self.future._heard


_mutex = threading.Lock()
_saves: list[RunningSave] = []  # in the order of their calls


def register(save: RunningSave) -> None:
    with _mutex:
        _saves.append(save)


def known() -> list[RunningSave]:
    """The saves that are not over, and those that failed and that nobody has heard of."""
    with _mutex:
        _saves[:] = [save for save in _saves if not save.is_over() or save.is_unheard()]
        return list(_saves)


def running() -> list[RunningSave]:
    """The saves that are not over, in the order of their calls."""
    return [save for save in known() if not save.is_over()]


def failures() -> str:
    """What nobody has heard of; empty if there is nothing."""
    return "; ".join(
        f"an earlier save, into {save.stats.path}, failed: {save.future.error}"
        for save in known()
        if save.is_unheard()
    )


def hear() -> tuple[str, BaseException | None]:
    """`failures`, and the first of the errors; now all have been heard of."""
    text = failures()
    unheard = [save for save in known() if save.is_unheard()]
    for save in unheard:
        save.told()
    return text, unheard[0].future.error if unheard else None


BUSY = "another save is going on"


def wait_for(saves: list[RunningSave], timeout: float | None) -> None:
    """Wait until all of `saves` are over. Raises ConflictError after `timeout` seconds."""
    wait([save.future for save in saves], timeout)
    late = [save for save in saves if not save.is_over()]
    if late:
        path = late[0].stats.path
        raise ConflictError(f"{BUSY}, into {path}, and did not end within {timeout} seconds")


def close(timeout: float | None = None) -> None:
    """Wait until the saves of this process are over; then raise a CheckpointError for those that
    failed and that nobody has heard of."""
    wait_for(running(), timeout)
    text, error = hear()
    if error is not None:
        raise CheckpointError(text) from error


stager.saves_beside.append(close)


def warn(message: str) -> None:
    warn_caller(f"torch_ckpt: {message}", RuntimeWarning)


@atexit.register
def _name_the_unheard() -> None:
    # Threads that save have been joined: what is not over now will not be.
    for save in known():
        outcome = f"failed: {save.future.error}" if save.is_over() else "was not over"
        warn(f"the save into {save.stats.path} {outcome}")


def _forget_parents() -> None:
    global _mutex
    _mutex = threading.Lock()  # the parent's may be held for ever
    _saves.clear()


os.register_at_fork(after_in_child=_forget_parents)
