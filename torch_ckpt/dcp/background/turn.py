"""Whether a save may begin beside others of this process, and when: rank 0 says so for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Literal

from torch_ckpt.dcp import saves
from torch_ckpt.dcp.saves import AsyncSave, OnFailure
from torch_ckpt.errors import CheckpointError, ConflictError
from torch_ckpt.ranks import Ranks

OnBusy = Literal["wait", "raise", "overlap"]

_beginning = threading.Lock()  # of two threads that call at once, one sees the other's save


class Turn:
    """That a save may begin.

    earlier: the saves beside which it is staged. They are over before it is written.
    running: all that were running when it was called.
    """

    def __init__(
        self,
        save: AsyncSave,
        running: list[AsyncSave],
        heard: str,
        *,
        overlaps: bool,
        timeout: float,
    ) -> None:
        self.running = running
        self.earlier = running if overlaps else []
        self._save = save
        self._heard = heard
        self._timeout = timeout

    def wait(self) -> None:
        """Until it may be staged. Raises ConflictError; on this rank alone, where others of its own
        are late."""
        if not self.earlier:
            saves.wait_for(self.running, self._timeout)
        self._save.stats.waited_s = self._save.elapsed()
        if self._heard != "":
            saves.warn(self._heard)


def begin(
    save: AsyncSave,
    ranks: Ranks,
    check: Callable[[], None],
    on_busy: OnBusy,
    on_failure: OnFailure,
    timeout: float,
) -> Turn:
    """Register `save`, if it may begin.

    Raises, on all ranks alike, what `check` raises on one, ConflictError where other saves are
    running, CheckpointError where nobody has heard yet that an earlier one failed.
    """
    with _beginning:
        running = saves.running()
        if on_busy == "overlap" and any(save.shares_with(earlier) for earlier in running):
            on_busy = "wait"
        verdict = ranks.gather(
            "async_save", check, lambda _: _verdict(on_busy, on_failure, timeout)
        )
        if "busy" in verdict:
            raise ConflictError(verdict["busy"], rank=ranks.rank)
        if on_busy != "overlap":
            # Rank 0 may be ahead. `Turn.wait` looks what came of it, where others hear of that.
            wait(running, timeout)
        heard, error = saves.hear()
        if "failed" in verdict:
            raise CheckpointError(verdict["failed"], rank=ranks.rank) from error
        saves.register(save)
    # Heard of in a warning: on_failure="warn", or rank 0 has heard of it before.
    return Turn(save, running, heard, overlaps=on_busy == "overlap", timeout=timeout)


def _verdict(on_busy: OnBusy, on_failure: OnFailure, timeout: float) -> dict[str, Any]:
    """Why rank 0 would not begin a save now: {"busy": text} or {"failed": text}; {} if it would."""
    if on_busy == "wait":
        try:
            saves.wait_for(saves.running(), timeout)
        except ConflictError as error:
            return {"busy": error.message}
    elif on_busy == "raise" and saves.running():
        return {"busy": f"{saves.BUSY}, into {saves.running()[0].stats.path}"}
    failed = saves.failures() if on_failure == "raise" else ""
    return {"failed": failed} if failed != "" else {}


def _forget_parents() -> None:
    global _beginning
    _beginning = threading.Lock()  # the parent's may be held for ever


os.register_at_fork(after_in_child=_forget_parents)
