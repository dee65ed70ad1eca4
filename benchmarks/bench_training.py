"""Rows: the steps of a training run of two ranks, and the base model that it begins with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import environment, files, ranks, rivals
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing
from benchmarks.training_jobs import BACKGROUND, LOADS, STEPS, bytes_of, llama

WORLD = 2
LAYERS = 7
BASE_LAYERS = 20
# Of the packages of tests/requirements-frameworks.txt, which `./dev bench` makes.
FRAMEWORKS = environment.REPOSITORY / "build" / "frameworks" / "bin" / "python"
COPY = "copy, then O_DIRECT write"


def run(
    context: Context, job: str, contender: str, layers: int, path: Path, total: float = 0.0
) -> dict[str, Any]:
    """Starts the ranks and waits for their figures.

    Raises:
        ranks.RankError: one of them failed.
    """
    words = [job, contender, "--scale", str(context.scale), "--layers", str(layers)]
    words += ["--path", str(path), "--program", str(context.program.path), "--total", repr(total)]
    python = str(FRAMEWORKS) if FRAMEWORKS.exists() else None
    answer = ranks.run_ranks("benchmarks.training_rank", [words] * WORLD, python)[0]
    assert answer is not None  # rank 0 speaks for all
    return answer


def why_not(contender: str) -> str:
    """Why a contender cannot run; empty if it can."""
    if "torchtitan" in contender or "AutoModel" in contender:
        return "" if FRAMEWORKS.exists() else "./dev bench makes an environment of frameworks"
    return rivals.why_not_ours("Checkpointer") if contender.startswith("ours") else ""


def _contenders(
    context: Context, job: str, names: Iterable[str], size: int, directory: Path
) -> list[Contender]:
    path = directory / "run"

    def timed(name: str) -> Timing:
        answer = run(context, job, name, LAYERS, path)
        figures = {
            "blocked": answer["blocked"] * 1e3,
            "durable": answer["seconds"] * 1e3,
            "first_blocked": answer["first_blocked"] * 1e3,
            "cpu": answer["cpu"] * 1e3,
            "memory": answer["memory"] / 1e6,
        }
        return Timing(answer["seconds"], answer["cpu"], size, int(answer["memory"]), figures)

    return [
        Contender(
            name=name,
            role="ours" if name.startswith("ours") else "rival",
            before=directory.mkdir,
            run=lambda name=name: timed(name),  # type: ignore[misc]
            after=lambda: files.remove(directory),
            skip=why_not(name),
        )
        for name in names
    ]


def _state(context: Context) -> tuple[int, int]:
    """Bytes and number of the tensors: weights, and two moments and a step of each."""
    model = llama(context.scale, LAYERS)
    count = len(list(model.parameters()))
    return 3 * bytes_of(model) + 4 * count, 4 * count


@row("train_step", memory=("touched",))
def train_step(context: Context) -> Row:
    """A step, waited for."""
    size, tensors = _state(context)
    return Row(
        title="A step of a Llama and AdamW in bfloat16, FSDP2 on 2 ranks, the second one, durable",
        bytes=size,
        tensors=tensors,
        contenders=[
            *_contenders(context, "step", STEPS, size, context.directory / "training"),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
    )


@row("train_background", memory=("touched",))
def train_background(context: Context) -> Row:
    """A step in the background."""
    size, tensors = _state(context)
    path = context.directory / "limit"

    def limit() -> Timing:
        copy = context.program.time("memcpy", size, 2)
        write = context.program.time("write", path, size, "direct")
        seconds = copy.seconds + write.seconds
        figures = {"blocked": copy.seconds * 1e3, "durable": seconds * 1e3}
        return Timing(seconds, copy.cpu_seconds + write.cpu_seconds, size, figures=figures)

    return Row(
        title="The same in the background, until the tensors may change and until it is durable",
        bytes=size,
        tensors=tensors,
        contenders=[
            *_contenders(context, "background", BACKGROUND, size, context.directory / "training"),
            Contender(name=COPY, role="limit", run=limit, after=lambda: files.remove(path)),
        ],
        limit=COPY,
        bound="reference",
        figures=(
            Figure("blocked", "blocked ms", worst=True, compared=True),
            Figure("first_blocked", "first save"),
            Figure("durable", "durable ms", worst=True, compared=True),
            Figure("cpu", "CPU ms"),
            Figure("memory", "memory MB"),
        ),
        memory=6,
    )


@row("train_base", memory=("touched",))
def train_base(context: Context) -> Row:
    """A base model from the Hub, cold, into FSDP2."""
    directory = context.directory / "base"
    total = run(context, "make_base", "-", BASE_LAYERS, directory)["total"]
    model = llama(context.scale, BASE_LAYERS)
    size, tensors = bytes_of(model), len(list(model.parameters()))
    del model
    found = [path for path in files.files_in(directory) if path.suffix == ".safetensors"]

    def timed(name: str) -> Timing:
        answer = run(context, "base", name, BASE_LAYERS, directory, total)
        return Timing(answer["seconds"], answer["cpu"], size, int(answer["memory"]))

    return Row(
        title="A Llama in bfloat16 from a directory of the Hub, cold, into FSDP2 on 2 ranks",
        bytes=size,
        tensors=tensors,
        contenders=[
            *(
                Contender(
                    name=name,
                    role="ours" if name.startswith("ours") else "rival",
                    run=lambda name=name: timed(name),  # type: ignore[misc]
                    skip=why_not(name),
                )
                for name in LOADS
            ),
            rivals.cold_read_limit(context, found),
        ],
        limit=rivals.COLD_READ,
        bound=rivals.READ_BOUND,
        close=lambda: files.remove(directory),
    )
