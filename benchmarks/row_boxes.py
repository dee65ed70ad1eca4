"""Row: the memory of a process that loads a part of what very many ranks have saved."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from benchmarks import boxes_job, environment, files, rivals, states
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing
from benchmarks.row_open import JobError
from benchmarks.simulated import Box, Part, save_as_ranks

WORLD, TENSORS = 4096, 750
FIGURES = (
    Figure("open_mb", "open, MB"),
    Figure("open_bytes", "bytes a box that is stored"),
    Figure("fixed_mb", "load of a row, MB"),
    Figure("load_mb", "load more than that, MB"),
    Figure("load_bytes", "bytes a box that is loaded"),
    Figure("milliseconds", "load ms", worst=True),
)


@row("open_boxes", memory=("as-is",))
def open_boxes(context: Context) -> Row:
    """750 tensors of which 4,096 ranks have saved a row each: three million boxes."""
    world, count = states.scaled(WORLD, context.scale), states.scaled(TENSORS, context.scale)
    source = context.directory / "source"

    def part(rank: int) -> Part:
        values = torch.full((1, boxes_job.COLUMNS), float(rank))
        box = Box(values, (rank, 0), (world, boxes_job.COLUMNS))
        return {boxes_job.name_of(number): box for number in range(count)}

    save_as_ranks(source, world, part)

    def add(name: str, rows: int) -> Contender:
        words = [sys.executable, "-m", "benchmarks.boxes_job", "--source", str(source)]
        words += ["--world", str(world), "--tensors", str(count), "--rows", str(rows)]
        words += ["--program", str(context.program.path)]

        def run() -> Timing:
            done = subprocess.run(words, cwd=environment.REPOSITORY, capture_output=True, text=True)
            if done.returncode != 0:
                last = done.stderr.strip().splitlines()[-1:]
                raise JobError(": ".join([f"it ended with status {done.returncode}", *last]))
            said = json.loads(done.stdout.splitlines()[-1])
            if not said["right"]:
                raise JobError("its rows have other values than were saved")
            more = max(0, said["load"] - said["fixed"])
            figures = {
                "open_mb": said["open"] / 1e6,
                "open_bytes": said["open"] / (world * count),
                "fixed_mb": said["fixed"] / 1e6,
                "load_mb": more / 1e6,
                "load_bytes": more / ((rows - 1) * count),
                "milliseconds": said["seconds"] * 1e3,
            }
            size = rows * count * boxes_job.COLUMNS * 4
            return Timing(said["seconds"], said["cpu"], size, said["load"], figures)

        return Contender(
            name=f"ours, {name}",
            role="ours",
            before=lambda: files.bring_into_memory(files.files_in(source)),
            run=run,
            skip=rivals.why_not_ours("load", "LocalBoxes"),
        )

    return Row(
        title=f"Open, and load rows of {count:,} tensors of which {world:,} ranks have one each",
        bytes=world * count * boxes_job.COLUMNS * 4,
        tensors=count,
        contenders=[
            add("8 rows of each", 8),
            add("a rank of 8", world // 8 if world > 8 else 2),
            add("all rows", world),
        ],
        limit="",
        figures=FIGURES,
        close=lambda: files.empty(context.directory),
    )
