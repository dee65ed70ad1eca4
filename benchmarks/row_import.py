"""Rows: what it takes to be there. An import beside torch's, and the command line."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from benchmarks import environment, rivals
from benchmarks.contender import Contender, Context, Figure, Role, Row, row
from benchmarks.program import Timing

FIGURES = (Figure("milliseconds", "ms", worst=True, compared=True), Figure("cpu", "CPU ms"))


def _process(name: str, role: Role, *words: str, skip: str = "") -> Contender:
    """A Python of these arguments, from its start to its end."""

    def run() -> Timing:
        start, used = time.perf_counter(), _cpu_of_children()
        subprocess.run(
            [sys.executable, *words],
            cwd=environment.REPOSITORY,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
        cpu = _cpu_of_children() - used
        return Timing(seconds, cpu, 1, figures={"milliseconds": 1e3 * seconds, "cpu": 1e3 * cpu})

    return Contender(name=name, role=role, run=run, skip=skip)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(title: str, contenders: list[Contender]) -> Row:
    """The first of them is the limit."""
    limit = contenders[0].name
    return Row(title, bytes=1, tensors=1, contenders=contenders, limit=limit, figures=FIGURES)


@row("import_torch", memory=("as-is",))
def import_torch(context: Context) -> Row:
    """What a program waits for that imports us, beside torch."""
    return _row(
        "Import beside torch: a process from its start to its end",
        [
            _process("torch alone", "limit", "-c", "import torch"),
            _process(
                "and torch.distributed.checkpoint",
                "rival",
                *("-c", "import torch, torch.distributed.checkpoint"),
            ),
            _process(
                "and ours",
                "ours",
                *("-c", "import torch, torch_ckpt"),
                skip=rivals.why_not_ours("load", "save"),
            ),
        ],
    )


@row("import_command", memory=("as-is",))
def import_command(context: Context) -> Row:
    """What a person waits for who asks what there is."""
    return _row(
        "Ask a command for help",
        [
            _process("Python alone", "limit", "-c", "pass"),
            _process("torchrun --help", "rival", "-m", "torch.distributed.run", "--help"),
            _process("torch-ckpt --help", "ours", "-m", "torch_ckpt", "--help"),
        ],
    )
