"""Small pieces that several rows share: imports that may fail, limits, safetensors reading."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks import environment, files
from benchmarks.contender import Contender, Context
from benchmarks.program import Timing
from benchmarks.states import State

STOCK_PLANNER = "stock"
OUR_PLANNER = "torch_ckpt"


def why_not_torch_checkpointing() -> str:
    """Why that rival cannot run; empty if it is installed."""
    try:
        importlib.metadata.version("torch_checkpointing")
    except importlib.metadata.PackageNotFoundError:
        return (
            "torch_checkpointing is not installed; pip install torch_checkpointing==0.1.1 --no-deps"
        )
    return ""


def why_not(package: str) -> str:
    """Why that rival cannot run; empty if it is installed."""
    there = environment.version(package) != "not installed"
    return "" if there else f"{package} is not installed; pip install '.[dev]'"


def why_not_ours(*names: str) -> str:
    """Why our contenders cannot run: empty if torch_ckpt imports and has these names."""
    try:
        package = importlib.import_module("torch_ckpt")
        missing = [name for name in names if not hasattr(package, name)]
    except ImportError as error:  # also from an attribute that is imported when it is asked for
        reason = str(error).replace(f"{environment.REPOSITORY}/", "")
        return f"torch_ckpt cannot be imported: {reason}"
    return f"torch_ckpt has no {', '.join(missing)}" if missing else ""


def ours(name: str) -> Any:
    """An attribute of torch_ckpt, looked up late, so that rivals run without it."""
    return getattr(importlib.import_module("torch_ckpt"), name)


def our_least_workers() -> int:
    """How many threads ours runs where fewer are asked for; 1 where torch_ckpt is not there."""
    if why_not_ours("consolidate_safetensors_files"):
        return 1
    return int(importlib.import_module("torch_ckpt.native.jobs").MIN_WORKERS)


def quiet() -> None:
    """Silences what DCP says about running without process groups."""
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def split(names: Iterable[str], files: int) -> dict[str, int]:
    """Which of so many files, counted from 1, each tensor goes to: neighbours go together."""
    ordered = list(names)
    return {name: 1 + files * i // len(ordered) for i, name in enumerate(ordered)}


def read_safetensors(directory: Path, names: Iterable[str]) -> State:
    """Whole tensors from the safetensors files below ``directory``, by the safetensors package."""
    wanted = set(names)
    found: State = {}
    for path in files.files_in(directory):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, framework="pt") as file:
            for name in wanted.intersection(file.keys()):
                found[name] = file.get_tensor(name)
    return found


def limit(name: str, time: Callable[[], Timing], remove: Path | None = None) -> Contender:
    """A contender that asks limits.cc; ``remove`` is the file that it leaves."""

    def after() -> None:
        if remove is not None:
            files.remove(remove)

    return Contender(name=name, role="limit", run=time, after=after)


READ_BOUND = "reference"
"""What the two below are: several requests at once, or copies by other means, can be faster."""
FRESH = "O_DIRECT write, fresh file, queue depth 1"
RECYCLED = "O_DIRECT write, recycled file, queue depth 1"
COLD_READ = "O_DIRECT read, cold, queue depth 1"
WARM_READ = "warm read, 2 threads"


def write_limit(context: Context, name: str, mode: str, bytes_: int) -> Contender:
    """The disk's own time to store ``bytes_``: 8 MiB pieces and fdatasync."""
    path = context.directory / f"limit-{mode}"
    return limit(name, lambda: context.program.time("write", path, bytes_, mode), path)


def warm_read_limit(context: Context, threads: int, paths: list[Path]) -> Contender:
    """The page cache's own time to hand over these files."""
    name = WARM_READ if threads == 2 else "warm read, 1 thread"
    return limit(name, lambda: context.program.time("read_warm", threads, *paths))


def cold_read_limit(context: Context, paths: list[Path]) -> Contender:
    """The disk's own time to hand over these files."""
    return limit(COLD_READ, lambda: context.program.time("read_cold", *paths))
