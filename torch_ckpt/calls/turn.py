"""Whether a save may begin beside others of this process, and when: rank 0 says so for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Literal

from torch_ckpt.calls import futures
from torch_ckpt.calls.futures import OnFailure, RunningSave
from torch_ckpt.errors import CheckpointError, ConflictError
from torch_ckpt.ranks import Ranks

OnBusy = Literal["wait", "raise", "overlap"]

_beginning = threading.Lock()  # of two threads that call at once, one sees the other's save


class Turn:
    """That a save may begin.

    running: the saves that were running when it was called. They are over before it is written, and
        before it is staged, unless it overlaps them.
    """

    def __init__(
        self, save: RunningSave, running: list[RunningSave], *, overlaps: bool, timeout: float
    ) -> None:
        self.running = running
        self.heard = ""  # of an earlier save that failed
        self._save = save
        self._overlaps = overlaps
        self._timeout = timeout

    def wait(self) -> None:
        """Until it may be staged. Raises ConflictError; on this rank alone, where others of its own
        are late."""
        if not self._overlaps:
            futures.wait_for(self.running, self._timeout)
        self._save.stats.waited_s = self._save.elapsed()
        if self.heard != "":
            futures.warn(self.heard)


def begin(
    save: RunningSave,
    ranks: Ranks,
    check: Callable[[], None],
    on_busy: OnBusy,
    on_failure: OnFailure,
    timeout: float,
) -> Turn:
    """Register `save`, and say when it may begin.

    Raises, on all ranks alike, what `check` raises on one, ConflictError where other saves are
    running, CheckpointError where nobody has heard yet that an earlier one failed. The save is
    registered until it has finished: finish it then.
    """
    with _beginning:
        running = futures.running()
        futures.register(save)
    overlaps = on_busy == "overlap" and not any(save.shares_with(other) for other in running)
    turn = Turn(save, running, overlaps=overlaps, timeout=timeout)

    def own() -> None:
        check()
        if on_busy != "raise" and not overlaps:
            futures.wait_for(running, timeout)

    verdict = ranks.gather("async_save", own, lambda _: _verdict(running, on_busy, on_failure))
    if "busy" in verdict:
        raise ConflictError(verdict["busy"], rank=ranks.rank)
    turn.heard, error = futures.hear()
    if "failed" in verdict:
        raise CheckpointError(verdict["failed"], rank=ranks.rank) from error
    # Heard of in a warning: on_failure="warn", or rank 0 has heard of it before.
    return turn


def _verdict(running: list[RunningSave], on_busy: OnBusy, on_failure: OnFailure) -> dict[str, str]:
    """Why rank 0 would not begin a save now: {"busy": text} or {"failed": text}; {} if it would."""
    busy = [save for save in running if not save.is_over()] if on_busy == "raise" else []
    if busy:
        return {"busy": f"{futures.BUSY}, into {busy[0].stats.path}"}
    failed = futures.failures() if on_failure == "raise" else ""
    return {"failed": failed} if failed != "" else {}


def _forget_parents() -> None:
    global _beginning
    _beginning = threading.Lock()  # the parent's may be held for ever


os.register_at_fork(after_in_child=_forget_parents)
