"""Row: what the coordinator of very many ranks does alone, at the end of a save."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing
from benchmarks.simulated import Box, Part, SimulatedSave

WORLDS = (512, 1024, 2048, 4096)
TENSORS = 4
FIGURES = (
    Figure("milliseconds", "commit ms", worst=True),
    Figure("microseconds_a_rank", "us a rank", worst=True),
)


def contender(path: Path, world: int) -> Contender:
    """A save of `world` ranks, which are played by this process and write before the clock starts;
    files are not synced."""
    saves: list[SimulatedSave] = []

    def part(rank: int) -> Part:
        rows = torch.full((1, 64), float(rank))
        return {f"layers.{i}.weight": Box(rows, (rank, 0), (world, 64)) for i in range(TENSORS)}

    def before() -> None:
        saves.append(SimulatedSave(path, world, part))
        saves[-1].write()

    def run() -> Timing:
        usage, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        saves[-1].commit()
        seconds = time.perf_counter() - start
        ended = resource.getrusage(resource.RUSAGE_SELF)
        cpu = ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime
        figures = {"milliseconds": seconds * 1e3, "microseconds_a_rank": seconds / world * 1e6}
        return Timing(seconds, cpu, world * TENSORS * 256, figures=figures)

    def check() -> None:
        described = rivals.ours("Checkpoint")(path).describe()
        if len(described.tensors) != TENSORS or described.world_size != world:
            raise ValueError(f"the checkpoint is not that of {world} ranks")

    def after() -> None:
        saves.clear()
        if path.exists():
            files.remove(path)

    return Contender(
        name=f"ours, {world:,} ranks",
        role="ours",
        before=before,
        run=run,
        check=check,
        after=after,
        skip=rivals.why_not_ours("HuggingFaceStorageWriter"),
    )


@row("commit_ranks", memory=("as-is",))
def commit_ranks(context: Context) -> Row:
    """The commit, in which stock's coordinator writes nothing and proves nothing."""
    worlds = sorted({states.scaled(world, context.scale) for world in WORLDS})
    return Row(
        title=f"Commit of a save of many ranks with {TENSORS} tensors each: the coordinator alone",
        bytes=worlds[-1] * TENSORS * 256,
        tensors=TENSORS,
        contenders=[contender(context.directory / "saved", world) for world in worlds],
        limit="",
        figures=FIGURES,
    )
