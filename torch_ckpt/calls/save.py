"""Save: one save by all its ranks, in five steps: plan, gather, lay out, write, commit. And
SaveStats: what it took.

They are the calls of DCP's protocols, in the order of `torch.distributed.checkpoint.save`, so that
any planner and any storage writer can be given. What our writer does in them for a directory is in
directory_save.py.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torch_ckpt.dcp.plan.save_planner import SavePlanner as OurPlanner
from torch_ckpt.dcp.write.commit import Phases
from torch_ckpt.dcp.write.layouts import Layout
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.extras import extra_files
from torch_ckpt.native.progress import Progress
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.mapped_state import Kinds, merged
from torch_ckpt.ranks import Ranks


@dataclass(slots=True)
class SaveStats(Phases):
    """Times in seconds and bytes of one save, as this rank has seen it: its Phases, and what is
    around them; None where it is not known (yet). A planner, writer or stager that is not ours does
    not tell. `log_path` of a save appends these to a file, and `torch-ckpt timeline` draws them.

    started: when it was called, in seconds since 1970.
    waited_s: for earlier saves, before anything else.
    staged_s, staged_bytes: the copy into host memory that follows, of a save in the background.
    blocked_s: the whole call of `async_save`.
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
    total_s: float | None = None

    def count(self, metadata: Metadata) -> None:
        """Take the phases of this rank, which our writer has left in the save's metadata."""
        phases = metadata.storage_data
        mine = phases.get(self.rank) if isinstance(phases, dict) else None
        if isinstance(mine, Phases):
            for each in fields(Phases):
                setattr(self, each.name, getattr(mine, each.name))


class SavedMetadata(Metadata):
    """DCP's Metadata of a save that is committed, and `stats`, the SaveStats of this rank."""

    stats: SaveStats

    def __init__(self, metadata: Metadata, stats: SaveStats) -> None:
        self.__dict__.update(vars(metadata))
        self.stats = stats
        stats.count(metadata)


def append_to_log(path: str | None, stats: SaveStats) -> str | None:
    """Append one line to the log of saves, where there is one. Why there is no line now, for a
    warning: a log that cannot be written is no reason to fail a save."""
    if path is None:
        return None
    # First which save it was.
    line = json.dumps(dict.fromkeys(SaveStats.__annotations__) | asdict(stats)) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())  # at once, or lines of ranks would mix
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        return f"no line in the log of saves: {error}"
    return None


@dataclass
class Save:
    """One save. Pickles, without its ranks, for the process that saves.

    path: None where the writer has one.
    use_collectives: False: every rank saves its own part, and they agree at the end alone.
    metadata: JSON texts by their names, for the manifest.
    on_written: called when this rank has written, or could not; by writers of ours alone.
    cancel: once it is set on any rank, the save fails with a CancelledError, if it still can.
    """

    planner: SavePlanner
    writer: StorageWriter
    path: str | os.PathLike[str] | None
    ranks: Ranks
    use_collectives: bool = True
    metadata: dict[str, str] = field(default_factory=dict)
    on_written: Callable[[], None] | None = None
    progress: Progress | None = None
    cancel: threading.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        here = ("ranks", "on_written", "progress", "cancel")
        return {**self.__dict__, **dict.fromkeys(here)}

    @contextlib.contextmanager
    def portable(self) -> Iterator[Save]:
        """This save as it crosses to another process: until the end of the block there are files
        for `extras` that are objects. A model among them would cross with all of its memory."""
        if not isinstance(self.writer, HuggingFaceStorageWriter):
            yield self
            return
        with contextlib.ExitStack() as until:

            def with_files(layout: Layout) -> Layout:
                if layout.extras is None:
                    return layout
                given = layout.extras if self.ranks.rank == 0 else []  # asked there alone
                files = until.enter_context(extra_files(given, layout.dtype_policy.torch_name))
                return replace(layout, extras=files)

            writer = copy.copy(self.writer)
            writer.layouts = writer.layouts.mapped(with_files)
            if writer.consolidated is not None:
                writer.consolidated = with_files(writer.consolidated)
            yield replace(self, writer=writer)

    def run(self, state: Callable[[], dict[str, Any]]) -> Metadata:
        """Save what `state` returns, on every rank; what it raises is an error of all. A collective
        call: raises the same error on every rank, and nothing of a failed save is left.

        Holds no reference to the state when it returns.
        """
        what = self._what()
        metadata: list[Metadata] = []
        held: list[dict[str, Any]] = []
        kinds: Kinds | None = None

        def plan() -> SavePlan:
            began = time.perf_counter()
            self.writer.reset(self.path)
            if isinstance(self.writer, HuggingFaceStorageWriter) and not self.use_collectives:
                self.writer.count_save(self.ranks.rank)
            # A plain dict, as planners get it from stock: of other types ours keeps a record.
            return self._plan(held.pop() if held else dict(state()), began, kinds)

        def lay_out(plans: list[SavePlan]) -> list[SavePlan]:
            plans, planned = self.planner.create_global_plan(plans)
            metadata.append(planned)
            laid_out: list[SavePlan] = self.writer.prepare_global_plan(plans)
            return laid_out

        def write(plan: SavePlan) -> list[WriteResult]:
            with paused_gc(keeps=False):  # but for the native call in it
                written = self.writer.write_data(self.planner.finish_plan(plan), self.planner)
                written.wait()
            results: list[WriteResult] = written.value()
            return results

        def commit(results: list[list[WriteResult]]) -> Metadata:
            self.writer.finish(metadata=metadata[0], results=results)  # by name, as stock does
            return metadata[0]

        try:
            if not self.use_collectives:
                return self._run_alone(plan, lay_out, write, commit)
            # Planning makes some twenty objects per tensor, with stock's planner a hundred;
            # collecting between them takes longer than making them.
            with paused_gc(keeps=False):
                planner = self.planner
                if self.ranks.size > 1 and isinstance(planner, OurPlanner) and planner.pairs:
                    # Parts of one stored tensor may be on several ranks.
                    def look(of: OurPlanner = planner) -> Kinds:
                        held.append(dict(state()))
                        return of.own_kinds(held[0])

                    kinds = self.ranks.gather(f"tensors of {what}", look, merged)
                final_plan = self.ranks.scatter(f"plan of {what}", plan, lay_out)
            return self.ranks.gather(
                what,
                lambda: write(final_plan),
                commit,
                progress=self.progress,
                cancel=self.cancel,
            )
        finally:
            # The frames of an error keep these functions, and they what gives the state.
            state = dict
            held.clear()
            self._end()

    def _run_alone(self, plan: Any, lay_out: Any, write: Any, commit: Any) -> Metadata:
        what, writer = self._what(), self.writer
        planned: list[SavePlan] = []

        def begin() -> tuple[str, str] | None:
            with paused_gc(keeps=False):
                planned.extend(lay_out([plan()]))
            return writer.begun_part() if isinstance(writer, HuggingFaceStorageWriter) else None

        def write_here() -> list[WriteResult]:
            if isinstance(writer, HuggingFaceStorageWriter) and first is not None:
                writer.check_place(first)
            written: list[WriteResult] = write(planned[0])
            return written

        # What ranks do by themselves they begin and end together: one that fails, or that has
        # another place under the path, leaves no checkpoint to any.
        first = self.ranks.together(f"plan of {what}", begin)[0]
        results: list[list[WriteResult]] = []
        self.ranks.together(
            what,
            lambda: results.append(write_here()),
            progress=self.progress,
            cancel=self.cancel,
        )
        metadata: Metadata = self.ranks.each(f"commit of {what}", lambda: commit(results))
        return metadata

    def _what(self) -> str:
        if not isinstance(self.writer, HuggingFaceStorageWriter):
            return f"save by {type(self.writer).__name__}"
        # Nodes may mount a directory at different places.
        place = os.path.normpath(os.fsdecode(self.path or self.writer.path))
        return f"save into {os.path.basename(place)}"

    def _plan(self, state_dict: dict[str, Any], began: float, kinds: Kinds | None) -> SavePlan:
        planner, writer, ranks = self.planner, self.writer, self.ranks
        coordinates = ranks.rank == 0
        ours = writer if isinstance(writer, HuggingFaceStorageWriter) else None
        if isinstance(planner, OurPlanner):
            planner.begin(ranks.members, None if ours is None else ours.final_names(), kinds)
        set_up: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": coordinates}
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            set_up["storage_meta"] = writer.storage_meta()
        planner.set_up_planner(**set_up)
        told: dict[str, Any] = {}
        if "kwargs" in inspect.signature(writer.set_up_storage_writer).parameters:
            told = {"rank": ranks.rank, "use_collectives": self.use_collectives}
            if ours is not None:
                told |= {
                    "world_size": ranks.size,
                    "on_written": self.on_written,
                    "began": began,
                    "metadata": self.metadata,
                }
        if self.metadata and "metadata" not in told:
            raise InvalidArgumentError(
                "metadata needs a torch_ckpt.HuggingFaceStorageWriter whose set_up_storage_writer "
                "takes **kwargs"
            )
        writer.set_up_storage_writer(coordinates, **told)
        plan: SavePlan = writer.prepare_local_plan(planner.create_local_plan())
        return plan

    def _end(self) -> None:
        """After a failure elsewhere the coordinator still holds its staging directory. A planner
        that is kept would hold what was saved, which may be no tensors of the trainer's."""
        if isinstance(self.planner, DefaultSavePlanner):
            self.planner.state_dict = {}
        if isinstance(self.writer, HuggingFaceStorageWriter):
            self.writer.end_save()
