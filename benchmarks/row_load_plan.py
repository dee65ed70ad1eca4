"""Rows: the cost of planning a load when every tensor is stored in 64 pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from benchmarks import files, rivals, row_load, states
from benchmarks.contender import Contender, Context, Role, Row, row
from benchmarks.shards import write_shards

RANKS = 64


class Planning:
    """The steps of dcp.load before the first byte, so that each can be timed alone."""

    def __init__(self, make_reader: Callable[[str], Any], source: Path, state: states.State):
        self._make_reader = make_reader
        self._source = source
        self._state = state
        self._reader: Any = None
        self._metadata: Any = None

    def read_metadata(self) -> None:
        """Makes a reader, and reads what it says about the directory."""
        self._reader = self._make_reader(str(self._source))
        self._reader.reset()
        self._metadata = self._reader.read_metadata()

    def plan(self) -> None:
        """Plans by the stock planner, from the metadata read before."""
        reader, planner = self._reader, DefaultLoadPlanner()
        planner.set_up_planner(self._state, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plans = reader.prepare_global_plan(planner.create_global_plan([plan]))
        planner.finish_plan(plans[0])


def planning_contenders(
    target: states.State,
    source: Path,
    steps: Callable[[Planning], tuple[Callable[[], None], Callable[[], None]]],
) -> list[Contender]:
    """Stock's reader and ours; ``steps`` gives what runs before the clock and under it."""

    def add(name: str, role: Role, make: Callable[[str], Any], skip: str = "") -> Contender:
        before, run = steps(Planning(make, source, target))
        return Contender(
            name=name,
            role=role,
            run=run,
            before=before,
            planner=rivals.STOCK_PLANNER,
            nesting="flat",
            skip=skip,
        )

    return [
        add("DCP HF reader", "rival", HuggingFaceStorageReader),
        add(
            "ours, HF reader",
            "ours",
            lambda path: rivals.ours("HuggingFaceStorageReader")(path),
            rivals.why_not_ours("HuggingFaceStorageReader"),
        ),
    ]


def pieces_row(
    context: Context,
    title: str,
    contenders: Callable[[states.State, states.State, Path], list[Contender]],
    reads_tensors: bool = False,
) -> Row:
    """2,000 tensors of 16 KiB in 64 row shards each, wanted whole, files in the page cache."""
    shapes = {f"weight_{i}": (RANKS, 64) for i in range(states.scaled(2000, context.scale))}
    source = context.directory / "pieces"
    state = states.random_state(shapes, torch.float32)
    write_shards(state, source, RANKS, 0)
    files.make_durable(source)
    sample = states.sample(state)
    del state
    target = states.empty_like(shapes, torch.float32)
    made = contenders(target, sample, source)
    if reads_tensors:
        made.append(rivals.warm_read_limit(context, 2, files.files_in(source)))
    return Row(
        title=title,
        bytes=states.total_bytes(shapes, torch.float32),
        tensors=len(shapes),
        contenders=made,
        limit=rivals.WARM_READ if reads_tensors else "",
        per_tensor=True,
        close=lambda: files.remove(source),
    )


@row("load_metadata")
def load_metadata(context: Context) -> Row:
    """Only what the directory holds: 64 headers."""

    def contenders(target: states.State, _: states.State, source: Path) -> list[Contender]:
        def steps(planning: Planning) -> tuple[Callable[[], None], Callable[[], None]]:
            return lambda: files.bring_into_memory(files.files_in(source)), planning.read_metadata

        return planning_contenders(target, source, steps)

    return pieces_row(context, f"Read metadata, {RANKS} stored pieces a tensor, warm", contenders)


@row("load_plan")
def load_plan(context: Context) -> Row:
    """Only the plan, from metadata that has been read."""

    def contenders(target: states.State, _: states.State, source: Path) -> list[Contender]:
        return planning_contenders(
            target, source, lambda planning: (planning.read_metadata, planning.plan)
        )

    return pieces_row(context, f"Load plan, {RANKS} stored pieces a tensor", contenders)


@row("load_pieces")
def load_pieces(context: Context) -> Row:
    """The whole load, so that work put off until the read is counted too."""

    def contenders(target: states.State, sample: states.State, source: Path) -> list[Contender]:
        def add(
            name: str, role: Role, load: row_load.Loader, planner: str, skip: str = ""
        ) -> Contender:
            return row_load.loader(
                name, role, load, target, sample, source, cold=False, planner=planner, skip=skip
            )

        return [
            add("DCP HF reader", "rival", row_load.load_with_stock_hf, rivals.STOCK_PLANNER),
            add(
                "ours, HF reader",
                "ours",
                row_load.load_with_our_reader,
                rivals.STOCK_PLANNER,
                rivals.why_not_ours("HuggingFaceStorageReader"),
            ),
            add(
                "ours, load",
                "ours",
                row_load.load_with_our_load,
                rivals.OUR_PLANNER,
                rivals.why_not_ours("load"),
            ),
        ]

    title = f"Whole load, {RANKS} stored pieces a tensor, warm"
    return pieces_row(context, title, contenders, reads_tensors=True)
