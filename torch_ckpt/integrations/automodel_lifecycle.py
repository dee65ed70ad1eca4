"""When a step of AutoModel counts: its CheckpointLifecycle, in the background and for all ranks.

An async step, all on rank 0, and what a kill leaves:

1. Model, optimizer and export are committed by their saves, each for itself. The step has the mark
   `.incomplete` since before its first byte.
2. What others have written into the step is synced. LATEST names the step; then the mark goes. A
   kill in between leaves LATEST at a step that AutoModel passes over, with a line in the log.
3. LOWEST_VAL, then the deletion of what is too old.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from functools import partial
from typing import Any
from uuid import uuid4

from nemo_automodel.components.checkpoint.lifecycle import (
    _RESERVATION_STAGING_SUFFIX,
    CheckpointLifecycle,
)
from nemo_automodel.components.checkpoint.utils import is_checkpoint_incomplete

from torch_ckpt.calls.futures import AsyncSave
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native.jobs import in_thread
from torch_ckpt.ranks import Ranks
from torch_ckpt.runs.place import sync_directory

logger = logging.getLogger(__name__)

_NEW_POINTER = re.compile(
    r"\.(LATEST|LOWEST_VAL)\.[0-9a-f]{32}\.tmp"
)  # that is not in its place yet


def error_of(future: Future[Any]) -> BaseException | None:
    """Of a future that is done, and nobody counts as having heard of it."""
    return future.error if isinstance(future, AsyncSave) else future.exception()


class Lifecycle(CheckpointLifecycle):
    """AutoModel's CheckpointLifecycle, with these differences:

    - A step that is saved in the background is published when it is done, there, and not by the
      next save. Nobody waits for that, nor for the deletion of old steps.
    - An error of one rank is raised on all, as it is and naming the rank. What has failed in the
      background is raised by the next `complete_pending`.
    - A directory that a killed save has left goes out of the way by its name first: a kill while it
      is removed leaves nothing that counts as published.
    """

    def __init__(
        self, config: Any, process_group: Any, saves: Callable[[], Collection[Future[Any]]]
    ) -> None:
        """`saves`: what of the step is still being saved."""
        super().__init__(config, process_group)
        self._saves = saves
        self._began = False  # on all ranks alike: whether there is something to wait for
        self._work: Future[None] | None = None  # on rank 0

    @property
    def _ranks(self) -> Ranks:
        return Ranks.of(self.process_group)

    # --- agreement ----------------------------------------------------------

    def run_coordinator_step(self, operation: Callable[[], None], *, description: str) -> None:
        """Call `operation` on rank 0. Raises what it does, on all ranks."""

        def decide() -> None:
            operation()

        self._ranks.decide(description, decide)

    def _any_participant_reported(self, reported: bool) -> bool:
        return self._ranks.gather("whether any rank says so", lambda: reported, any)

    def _barrier(self) -> None:
        self._ranks.decide("lifecycle", lambda: None)

    # --- a step ---------------------------------------------------------------

    def reserve(self, path: str) -> None:
        """As AutoModel's. Raises InvalidArgumentError, too, where a pointer could not be written
        when the step is done."""

        def clear() -> None:
            root = os.fspath(self.config.checkpoint_dir)
            for name in os.listdir(root) if os.path.isdir(root) else ():
                if _NEW_POINTER.fullmatch(name):  # of a save that was killed: it keeps a step
                    os.unlink(os.path.join(root, name))
            for pointer in ("LATEST", "LOWEST_VAL"):
                place = os.path.join(root, pointer)
                if os.path.isdir(place) and not os.path.islink(place):
                    raise InvalidArgumentError(
                        "is a directory, and a link of this name is to lead to a step; move it "
                        "elsewhere",
                        file=place,
                    )
            if os.path.isdir(path) and is_checkpoint_incomplete(path):
                logger.warning("Replacing %s, which an interrupted save has left", path)
                os.rename(path, f"{path}{_RESERVATION_STAGING_SUFFIX}{uuid4().hex}")

        self.run_coordinator_step(clear, description=f"place of {os.path.basename(path)}")
        super().reserve(path)  # removes what was renamed, too

    def publish(self, path: str, *, best_val_metric: float | None, metric_key: str | None) -> None:
        """As AutoModel's; what is too old is deleted in the background."""
        step = partial(self._publish, path, best_val_metric, metric_key)
        self.run_coordinator_step(step, description=f"publication of {os.path.basename(path)}")
        self._begin(self._prune_old_checkpoints)

    def defer_publication(
        self, path: str, *, best_val_metric: float | None, metric_key: str | None
    ) -> None:
        """Publish the step when its saves are done. All else of it is written: AutoModel calls this
        behind a barrier."""
        saves = list(self._saves())

        def work() -> None:
            wait(saves)
            if any(error_of(save) is not None for save in saves):
                return  # which whoever waits for the save hears
            self._publish(path, best_val_metric, metric_key)
            self._prune_old_checkpoints()

        self._begin(work)

    def complete_pending(self) -> None:
        """Wait until what goes on in the background is through. Raises its error on all ranks."""
        if not self._began:
            return
        self._began = False
        work, self._work = self._work, None
        self._ranks.decide("publication", lambda: None if work is None else work.result())

    def _begin(self, work: Callable[[], None]) -> None:
        self._began = True
        if self._is_coordinator():
            before = self._work

            def after() -> None:
                if before is not None:
                    before.result()
                work()

            self._work = in_thread(after, "torch_ckpt-publish")

    def _publish(self, path: str, best: float | None, metric_key: str | None) -> None:
        self._publish_checkpoint(path)
        if best is not None:
            self._update_best_checkpoint(path, best, metric_key)

    def _publish_checkpoint(self, path: str) -> None:
        _sync_below(path)
        super()._publish_checkpoint(path)
        sync_directory(path)
        sync_directory(os.path.dirname(os.path.abspath(path)))


def _sync_below(path: str) -> None:
    """Have what others than our saves have written below `path` outlive a crash of the machine."""
    for folder, _, names in os.walk(path):
        for name in names:
            if not name.endswith(".safetensors"):  # ours, which are on the disk, and large
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
        sync_directory(folder)
