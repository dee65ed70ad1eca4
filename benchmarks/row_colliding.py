"""Row: a header whose names were made to collide in a hash table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import colliding, files, rivals
from benchmarks.contender import Contender, Context, Figure, Role, Row, row
from benchmarks.program import Timing

FILE = "model.safetensors"


def names_with_safe_open(path: Path) -> int:
    """The names that the safetensors package finds."""
    with safe_open(path / FILE, framework="pt") as file:
        return len(file.keys())


def names_with_ours(path: Path) -> int:
    """The tensors that Checkpoint.describe finds."""
    return len(rivals.ours("Checkpoint")(path).describe().tensors)


@row("describe_colliding", memory=("as-is",))
def describe_colliding(context: Context) -> Row:
    """32,768 names of 240 bytes, against as many others of that length."""
    bits = 15
    while bits > 3 and 1 << bits > 32768 * context.scale:
        bits -= 1
    colliding_names = colliding.names(bits)
    chance = random.Random(1)
    others = ["".join(chance.choices("abcdefgh.12345", k=16 * bits)) for _ in colliding_names]
    inputs = {"colliding names": colliding_names, "other names": others}
    for kind, names in inputs.items():
        folder = context.directory / kind.replace(" ", "-")
        folder.mkdir()
        save_file({name: torch.zeros(0, dtype=torch.uint8) for name in names}, folder / FILE)

    def add(who: str, role: Role, find: Callable[[Path], int], kind: str) -> Contender:
        path = context.directory / kind.replace(" ", "-")
        found: list[int] = []

        def run() -> Timing:
            cpu, start = time.process_time(), time.perf_counter()
            found[:] = [find(path)]
            seconds = time.perf_counter() - start
            cpu = time.process_time() - cpu
            return Timing(seconds, cpu, len(others), figures={"milliseconds": seconds * 1e3})

        def check() -> None:
            if found != [len(colliding_names)]:
                raise ValueError(f"{found} names instead of {len(colliding_names)}")

        return Contender(
            name=f"{who}, {kind}",
            role=role,
            before=lambda: files.bring_into_memory(files.files_in(path)),
            run=run,
            check=check,
            skip=rivals.why_not_ours("Checkpoint") if role == "ours" else "",
        )

    size = sum(path.stat().st_size for path in context.directory.rglob(FILE)) // 2
    return Row(
        title=f"Names of a header of {size / 1e6:.1f} MB, warm",
        bytes=size,
        tensors=len(colliding_names),
        contenders=[
            contender
            for kind in inputs
            for contender in (
                add("safetensors safe_open", "rival", names_with_safe_open, kind),
                add("ours, describe", "ours", names_with_ours, kind),
            )
        ],
        limit="",
        figures=(Figure("milliseconds", "ms", worst=True),),
        close=lambda: files.empty(context.directory),
    )
