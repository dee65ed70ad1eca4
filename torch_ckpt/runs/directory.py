"""CheckpointDirectory: the checkpoints of a training run, by step, for all its ranks.

What is on disk, and in which order it changes, is in place.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, TypeVar, get_args

import torch.distributed as dist

from torch_ckpt.calls import api, futures
from torch_ckpt.calls.async_save import async_save
from torch_ckpt.calls.futures import AsyncSave
from torch_ckpt.calls.save import SavedMetadata
from torch_ckpt.checkpoint.checkpoint import was_committed
from torch_ckpt.checkpoint.names import BEST, LATEST
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import ConflictError, IncompleteError, InvalidArgumentError, warn
from torch_ckpt.options import check_choice, integer, local_path
from torch_ckpt.planning.states import HasState
from torch_ckpt.ranks import Ranks, rank_and_size
from torch_ckpt.runs.metrics import Best, BestMode, metrics_of, step_metadata
from torch_ckpt.runs.place import (
    check_pointer,
    child_name,
    make_directory,
    newest_first,
    step_named,
    write_pointer,
)
from torch_ckpt.runs.retention import Deletions, is_committed

T = TypeVar("T")


class CheckpointDirectory:
    """The checkpoints of one job in directory `root`, one child `step-<n>` each.

    root: is made where there is none.
    keep_last: how many checkpoints saves leave, at least 1; None: all. After each save the older
        ones are deleted in the background, never before that save is committed.
    keep_every: with keep_last, steps that are multiples of it stay all the same.
    best, best_mode: the name of a metric, and whether it is to be small ("min") or large ("max"):
        the checkpoint that is best by it stays too, and a file BEST names it. It is rank 0's
        `metrics` that count, where they are finite; of equal ones the first stays the best.
    process_group: the ranks that save and load together; the default one if None.

    A child counts when a save of torch_ckpt has committed it: not while it is being saved or
    removed, nor after a save that died, and not when others than torch_ckpt wrote it. One that is
    damaged or has lost a file since counts too: to load it is an error that names the file, and
    nothing older is loaded in its place. The newest is the one of the highest step, whenever it was
    saved. Who goes back to an older step removes the later checkpoints first: `latest` and LATEST
    would go on to name the last of them, and a save below it is a warning.

    A deletion looks at the steps up to the one that was saved. It spares the newest `keep_last` of
    them, multiples of keep_every, what BEST names, what is not committed, links, and every other
    name. What saves that died have staged for these steps goes too, whatever `keep_last` is. It
    cannot know who reads: choose keep_last so that a checkpoint is loaded before as many newer ones
    are saved. With a writer of sync_files=False, checkpoints that are durable make way for one that
    is not.

    Two jobs cannot share a directory: each may replace and delete the other's steps, until a save
    finds in LATEST what its own job has not written there, which is a ConflictError.

    All ranks call the constructor, `save`, `async_save` and `load`, in one order and from one
    thread at a time. Rank 0 alone writes LATEST and BEST, deletes, and says which step is loaded
    where none is named. The other methods look at the disk, on whichever rank calls them.

    Raises InvalidArgumentError for arguments that make no sense, OSError; on all ranks alike.
    """

    # Which children are checkpoints, by their paths, and which of these are whole and may go: those
    # of torch_ckpt. A subclass may know those of another tool as well.
    _counts = staticmethod(was_committed)
    _is_whole = staticmethod(is_committed)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        best_mode: BestMode = "min",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        kept = _at_least_1("keep_last", keep_last)
        every = _at_least_1("keep_every", keep_every)
        if every is not None and kept is None:
            raise InvalidArgumentError("keep_every needs keep_last: without it all are kept")
        check_choice("best_mode", best_mode, get_args(BestMode))
        if best is not None and (type(best) is not str or not best):
            raise InvalidArgumentError(f"best is the name of a metric; it was {best!r}")
        self.root = local_path(root)
        self.keep_last = kept
        self._best = None if best is None else Best(self.root, best, best_mode)
        self._group = process_group
        self._publishing = threading.Lock()
        # On rank 0, what LATEST may name: as when this was made, or as it has written it since.
        self._known: set[int | None] = set()
        self._deletions = Deletions(self.root, kept, every, self._is_whole)
        self._decide("CheckpointDirectory", self._make)

    def _make(self) -> None:
        make_directory(self.root)
        self._known = {None, step_named(self.root, LATEST)}

    def _decide(self, what: str, decide: Callable[[], T]) -> T:
        """What `decide` returns on rank 0."""
        return Ranks.of(self._group).decide(what, decide)

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is, or would be: root/step-<step>. One that is there with
        zeros before its number is found."""
        return os.path.join(self.root, child_name(self.root, _checked_step(step)))

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, in ascending order."""
        return sorted(newest_first(self.root, self._counts))

    def latest(self) -> str | None:
        """The path of the newest committed checkpoint; None if there is none."""
        step = self._latest_step()
        return None if step is None else self.path(step)

    def _latest_step(self) -> int | None:
        return next(newest_first(self.root, self._counts), None)

    def best(self) -> str | None:
        """The path of the best committed checkpoint; None if there is none."""
        step = step_named(self.root, BEST)
        if step is not None and was_committed(self.path(step)):
            return self.path(step)
        found = None if self._best is None else self._best.find()  # it was removed
        return None if found is None else self.path(found)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that the checkpoint of `step` was saved with. Raises IncompleteError where
        there is none, and what `torch_ckpt.open` does."""
        return metrics_of(self.path(step))

    def save(
        self,
        state_dict: Mapping[str, Any] | HasState,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SavedMetadata:
        """`torch_ckpt.save` into `path(step)`, with its `options`; then LATEST and BEST are
        written, and the deletion of what is too old begins.

        metrics: numbers, or tensors of one element, by name. The step and rank 0's metrics are part
        of the checkpoint's metadata.

        A `storage_writer` is one of ours; its own path does not matter. Raises what torch_ckpt.save
        does, and OSError where the save is committed but LATEST or BEST could not be written.
        """
        path = self._begin_save(step, metrics, options)
        metadata = api.save(state_dict, path, process_group=self._group, **options)
        self._decide("LATEST", lambda: self._publish(step))
        return metadata

    def async_save(
        self,
        state_dict: Mapping[str, Any] | HasState,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        on_commit: Callable[[], None] | None = None,
        **options: Any,
    ) -> AsyncSave:
        """`torch_ckpt.async_save` into `path(step)`, with its `options`; `metrics` are as for
        `save`. LATEST and BEST are written and the deletion begins before its future is done, and
        before `on_commit` is called.

        Returns what torch_ckpt.async_save does. Where the save is committed but LATEST or BEST
        could not be written, the future of rank 0 raises the OSError, and of rank 0 alone.
        """
        path = self._begin_save(step, metrics, options)
        publishes = rank_and_size(self._group)[0] == 0

        def committed() -> None:
            if publishes:
                self._publish(step)
            if on_commit is not None:
                on_commit()

        return async_save(
            state_dict,
            path,
            process_group=self._group,
            on_commit=committed,
            **options,
        )

    def load(
        self,
        state_dict: MutableMapping[str, Any] | HasState,
        step: int | None = None,
        *,
        missing_ok: bool = False,
        **options: Any,
    ) -> int | None:
        """`torch_ckpt.load` of the checkpoint of `step`, with its `options`; if `step` is None, of
        the newest, as rank 0 sees it. Returns the step.

        missing_ok: where there is no checkpoint, as when a run begins, return None on all ranks.

        Raises IncompleteError where there is none, and what torch_ckpt.load does: one that is
        damaged is an error, nothing older is loaded in its place.
        """
        name, found = self._decide("step to load", lambda: self._named(step))
        if found is None and missing_ok:
            return None
        if found is None:
            raise IncompleteError("holds no committed checkpoint", file=self.root)
        path = os.path.join(self.root, name)
        api.load(state_dict, path, process_group=self._group, **options)
        return found

    def _named(self, step: int | None) -> tuple[str, int | None]:
        """The name and the number of `step`, or of the newest if it is None."""
        found = self._latest_step() if step is None else step
        if found is None:
            return "", None
        return os.path.basename(self.path(found)), _checked_step(found)

    def close(self) -> None:
        """Wait for the async saves of this process and for the deletions. The directory may be used
        again.

        Raises CheckpointError for a save that failed and that nobody has heard of, and the error
        of a deletion that failed and was not made up for by a later one.
        """
        try:
            futures.close()
        finally:
            self._deletions.close()

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin_save(
        self, step: int, metrics: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> str:
        """Where `step` is saved; `options` has the step and the metrics then, as metadata. What is
        wrong with one rank's arguments is an error of all."""

        def check() -> int:
            number = _checked_step(step)
            if not isinstance(options.get("storage_writer"), HuggingFaceStorageWriter | None):
                raise InvalidArgumentError(
                    "a CheckpointDirectory needs a torch_ckpt.HuggingFaceStorageWriter: what "
                    "others write has no mark that says whether it is whole",
                    file=self.root,
                )
            rank, world_size = rank_and_size(self._group)
            if options.get("no_dist") and world_size > 1:
                raise InvalidArgumentError(
                    "no_dist would make every rank save its own checkpoint here", file=self.root
                )
            # Rank 0's count: of the others no tensor is waited for.
            if rank == 0:
                if self._best is not None:
                    self._best.check(metrics)
                given = options.get("metadata")
                options["metadata"] = step_metadata(number, metrics, given)
            return number

        # Rank 0 alone: a node that has looked for what is not there yet does not see it for a while
        # when it is, where a file system keeps what it was told.
        def begin(steps: list[int]) -> str:
            for rank, number in enumerate(steps):
                if number != steps[0]:
                    raise InvalidArgumentError(
                        f"rank 0 saves step {steps[0]}, rank {rank} step {number}", rank=rank
                    )
            for pointer in (LATEST, BEST):
                check_pointer(self.root, pointer)
            self._check_alone()
            self._deletions.spare(steps[0])
            return os.path.basename(self.path(steps[0]))

        name = Ranks.of(self._group).gather("beginning of a save", check, begin)
        return os.path.join(self.root, name)

    def _check_alone(self) -> None:
        """Raise ConflictError where LATEST names what this job has not saved."""
        with self._publishing:
            named = step_named(self.root, LATEST)
            if named not in self._known:
                raise ConflictError(
                    f"another job has saved step {named} here meanwhile; each job needs a "
                    "directory of its own",
                    file=self.root,
                )

    def _publish(self, step: int) -> None:
        """On rank 0, when `step` is committed."""
        step = _checked_step(step)
        with self._publishing:  # two saves in the background may end at once
            newest = next(newest_first(self.root, self._counts), None)
            if newest is None:
                return  # somebody has removed them all
            self._known.add(newest)  # before: an error may come when it is written
            write_pointer(self.root, LATEST, newest)
            self._known = {None, newest}
            if self._best is not None:
                self._best.committed(step)
        if newest > step:
            name = child_name(self.root, newest)
            warn(
                f"{self.root}: saved a step below {name}, which stays the latest; "
                "if the training went back, remove the later checkpoints"
            )
        self._deletions.begin(step)


def _at_least_1(argument: str, value: Any) -> int | None:
    number = None if value is None else integer(value)
    if value is not None and (number is None or number < 1):
        raise InvalidArgumentError(f"{argument} is None or at least 1; it was {value!r}")
    return number


def _checked_step(step: Any) -> int:
    number = integer(step)
    if number is None or number < 0:
        raise InvalidArgumentError(f"a step is an integer from 0 on; it was {step!r}")
    return number
