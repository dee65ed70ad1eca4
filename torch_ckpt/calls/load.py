"""Load: one load by all its ranks, in four steps: plan, gather, lay out, read.

They are the calls of DCP's protocols, in the order of `torch.distributed.checkpoint.load`, so that
any planner and any storage reader can be given.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from torch_ckpt.dcp.plan.load_planner import LoadPlanner as OurPlanner
from torch_ckpt.dcp.plan.stock_planner import has_method_of
from torch_ckpt.dcp.read.reader import CheckpointReader, check_seen
from torch_ckpt.native.progress import Progress
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.states import has_state, states_of
from torch_ckpt.ranks import Ranks


@dataclass
class Load:
    """One load.

    path: None where the reader has one.
    """

    planner: LoadPlanner
    reader: StorageReader
    path: str | os.PathLike[str] | None
    ranks: Ranks
    progress: Progress | None = None

    def run(self, state_dict: Any) -> None:
        """Fill `state_dict`. A collective call: raises the same error on every rank; tensors may
        then be filled in part."""
        what = f"load by {type(self.reader).__name__}"
        if isinstance(self.reader, CheckpointReader):
            place = os.path.normpath(os.fsdecode(self.path or self.reader.path))
            what = f"load of {os.path.basename(place)}"
        states: dict[str, Any] = {}

        def plan() -> LoadPlan:
            states.update(states_of(state_dict))
            return self._plan(states)

        def read() -> bool:
            """Whether this rank has entries that take their states themselves."""
            plan = self.planner.finish_plan(final_plan)
            self.reader.read_data(plan, self.planner).wait()
            if not isinstance(state_dict, Mapping):
                return True
            return any(has_state(state_dict[key]) for key in states if key in state_dict)

        # The objects of a plan are made in no time beside what collecting between them takes.
        with paused_gc(keeps=False):
            final_plan = self._agreed(f"plan of {what}", plan)
        taken = self.ranks.gather(what, read, any, progress=self.progress)
        if isinstance(self.planner, OurPlanner) and self.planner.rebuild and not state_dict:
            state_dict.update(states)
        if taken:
            # Only when all have read theirs: what one is given may not fit another's.
            self.ranks.gather(f"states of {what}", lambda: _give(state_dict, states), len)
        else:
            _give(state_dict, states)

    def _agreed(self, what: str, plan: Callable[[], LoadPlan]) -> LoadPlan:
        """This rank's plan, when rank 0 has seen what it looks at of all."""
        planner, reader = self.planner, self.reader
        if not (
            isinstance(planner, OurPlanner)
            and isinstance(reader, CheckpointReader)
            and has_method_of(planner, "create_global_plan", OurPlanner)
            and has_method_of(reader, "prepare_global_plan", CheckpointReader)
        ):

            def lay_out(plans: list[LoadPlan]) -> list[LoadPlan]:
                laid_out: list[LoadPlan] = reader.prepare_global_plan(
                    planner.create_global_plan(plans)
                )
                return laid_out

            # Under a name of its own: ranks of both kinds hear that they make different calls.
            return self.ranks.scatter(f"{what}, whole", plan, lay_out)
        own: list[LoadPlan] = []  # stays what it is, and would be most of what ranks say

        def say() -> tuple[Any, Any]:
            own.append(plan())
            return planner.say(own[0]), own[0].storage_data

        def look(said: list[tuple[Any, Any]]) -> None:
            planner.look([each for each, _ in said])
            check_seen(os.fspath(reader.path), [seen for _, seen in said])

        self.ranks.gather(what, say, look)
        return own[0]

    def _plan(self, states: dict[str, Any]) -> LoadPlan:
        reader, ranks = self.reader, self.ranks
        reader.reset(self.path)
        coordinates = ranks.rank == 0
        # Of readers like FileSystemReader, which know checkpoints that were saved without
        # collectives by their ranks.
        of_rank = False
        try:
            metadata = reader.read_metadata()
        except Exception as error:
            if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
                raise
            of_rank = True
            try:
                metadata = reader.read_metadata(rank=ranks.rank)
            except Exception:
                raise error from None  # of the metadata of all
        self.planner.set_up_planner(states, metadata, coordinates)
        told: dict[str, Any] = {}
        if "kwargs" in inspect.signature(reader.set_up_storage_reader).parameters:
            told = {"rank": ranks.rank, "use_collectives": not of_rank}
        reader.set_up_storage_reader(metadata, coordinates, **told)
        plan: LoadPlan = reader.prepare_local_plan(self.planner.create_local_plan())
        return plan


def _give(state_dict: Any, states: dict[str, Any]) -> None:
    """Give `state_dict` what was loaded."""
    if not isinstance(state_dict, Mapping):
        state_dict.load_state_dict(states)
        return
    entries: Any = state_dict
    # In one order on all ranks: what a `load_state_dict` does may be a collective.
    for key in sorted(states, key=str):
        if key not in entries:
            continue
        if has_state(entries[key]):
            entries[key].load_state_dict(states[key])
        else:
            entries[key] = states[key]
