"""Rows: saves in the background of a training process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, files, states
from benchmarks.async_contenders import AsyncContender, contenders
from benchmarks.async_trainer import DTYPE, SHAPES
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing

SAVES = 2  # the first, and one that finds what that has left
TIMEOUT_SECONDS = 1800  # a process that hangs would hang the whole run
LIMIT = "copy, then O_DIRECT write"
FIGURES = (
    Figure("call", "call ms"),
    Figure("blocking", "blocking ms", worst=True, compared=True),
    Figure("first_blocking", "first save", compared=True),
    Figure("durable", "durable ms", worst=True, compared=True),
    Figure("first_durable", "first save"),
    Figure("lost", "steps lost ms", worst=True),
    Figure("worst_step", "worst step x", worst=True),
    Figure("cpu", "CPU ms"),
    Figure("memory", "memory x"),
)

FIRST_FIGURES = (
    Figure("first_blocking", "blocking ms", worst=True, compared=True),
    Figure("first_durable", "durable ms", worst=True, compared=True),
    Figure("memory", "memory x"),
)
FIRST = ("DCP HF THREAD", "DCP FS THREAD", "ours, async_save", "ours, memory prepared")


class TrainerError(RuntimeError):
    """The training process failed."""


def run_trainer(
    context: Context, state: str, contender: str, path: Path, bytes_: int, saves: int
) -> Timing:
    """Starts a training process and waits for its figures.

    Raises:
        TrainerError: it failed, or it ended without a word.
    """
    words = [sys.executable, "-m", "benchmarks.async_trainer", contender, "--state", state]
    words += ["--scale", str(context.scale), "--path", str(path), "--saves", str(saves)]
    words += ["--program", str(context.program.path)]
    done = subprocess.run(
        words,
        cwd=environment.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    said = done.stdout.splitlines()
    answer = json.loads(said[-1]) if said else {}
    if "error" in answer:
        raise TrainerError(answer["error"])
    if done.returncode != 0 or not answer:
        last = done.stderr.strip().splitlines()[-1:]
        raise TrainerError(": ".join([f"it ended with status {done.returncode}", *last]))
    return timing(answer, bytes_)


def timing(answer: dict[str, Any], bytes_: int) -> Timing:
    """What a training process has printed, as the harness records it."""
    first, last, extra = answer["first"], answer["last"], answer["extra_memory"]
    figures = {name: last[name] * 1e3 for name in ("call", "blocking", "durable", "lost", "cpu")}
    figures["first_blocking"] = first["blocking"] * 1e3
    figures["first_durable"] = first["durable"] * 1e3
    figures["worst_step"] = last["worst_step"]
    figures["memory"] = extra / bytes_
    return Timing(last["durable"], last["cpu"], bytes_, extra, figures)


def limit(context: Context, bytes_: int) -> Contender:
    """The machine's own time: a copy into memory that has been touched, and a durable write."""
    path = context.directory / "limit"

    def run() -> Timing:
        copy = context.program.time("memcpy", bytes_, 2)
        write = context.program.time("write", path, bytes_, "direct")
        seconds, cpu = copy.seconds + write.seconds, copy.cpu_seconds + write.cpu_seconds
        figures = {"blocking": copy.seconds, "durable": seconds, "cpu": cpu}
        figures |= {f"first_{key}": figures[key] for key in ("blocking", "durable")}
        return Timing(
            seconds, cpu, bytes_, figures={key: value * 1e3 for key, value in figures.items()}
        )

    return Contender(name=LIMIT, role="limit", run=run, after=lambda: files.remove(path))


def async_row(
    context: Context, state: str, title: str, saves: int = SAVES, some: Sequence[str] = ()
) -> Row:
    """Every way to save ``state`` in the background, or some, so many times after each other."""
    shapes = SHAPES[state](context.scale)
    size = states.total_bytes(shapes, DTYPE)
    sample = states.sample(states.random_state(shapes, DTYPE))
    directory = context.directory / "training"
    path = directory / "saved"

    def add(name: str, found: AsyncContender) -> Contender:
        return Contender(
            name=name,
            role=found.role,
            before=directory.mkdir,
            run=lambda: run_trainer(context, state, name, path, size, saves),
            check=lambda: states.check_equal(sample, found.read(path, sample)),
            after=lambda: files.remove(directory),
            skip=found.skip,
        )

    return Row(
        title=f"Saves in the background of training, {title}",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *(
                add(name, found)
                for name, found in contenders(size).items()
                if not some or name in some
            ),
            limit(context, size),
        ],
        limit=LIMIT,
        bound="reference",
        figures=FIGURES if saves > 1 else FIRST_FIGURES,
        # The state, its copy, a copy of that in shared memory, and the file twice in a process.
        memory=6,
    )


@row("async_llama")
def async_llama(context: Context) -> Row:
    """The weights of a 1B Llama."""
    return async_row(context, "llama", "Llama 1B bfloat16")


@row("async_first")
def async_first(context: Context) -> Row:
    """The first save alone, which waits for memory that nobody has touched, or that has been."""
    return async_row(context, "llama", "Llama 1B bfloat16, the first one", 1, FIRST)


@row("async_experts")
def async_experts(context: Context) -> Row:
    """Thousands of small tensors."""
    return async_row(context, "experts", "a quarter of a mixture of experts, bfloat16")


@row("async_lora")
def async_lora(context: Context) -> Row:
    """A state so small that bytes cost nothing."""
    return async_row(context, "lora", "LoRA of rank 16 for Llama 1B, bfloat16")
