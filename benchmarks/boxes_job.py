"""A process that opens a checkpoint of very many boxes and loads some of them.

``python -m benchmarks.boxes_job`` prints a line of JSON: the most memory that each of the two took
above what the process had before. The open is given up before the load, which opens anew. A load of
one row of the same tensors comes first, so that what any load takes, its buffers above all, is in
use when the other begins: what that takes more is what it has for its boxes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import rivals
from benchmarks.program import LimitsProgram, MemoryWatcher

COLUMNS = 4


def name_of(tensor: int) -> str:
    """Of the checkpoint's tensors, each with a row for each rank that has saved."""
    return f"model.layers.{tensor}.weight"


def memory_of(watcher: MemoryWatcher, job: Callable[[], object]) -> int:
    """The most that a job takes, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = watcher.begin()
    kept = job()
    most = watcher.end()
    del kept
    return max(0, most - before)


def main(arguments: list[str]) -> int:
    """Does what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boxes_job")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--world", type=int, required=True, help="ranks that have saved")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="that are loaded of each tensor")
    parser.add_argument("--program", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)

    def load(targets: torch.Tensor) -> None:
        """Rows of each tensor, as a rank of several would, from the middle on."""
        shape, first = (options.world, COLUMNS), (options.world - len(targets[0])) // 2
        boxes = rivals.ours("LocalBoxes")
        state = {
            name_of(number): boxes(shape, [((first, 0), target)])
            for number, target in enumerate(targets)
        }
        rivals.ours("load")(state, options.source, no_dist=True)

    targets = torch.zeros(options.tensors, options.rows, COLUMNS)
    few = torch.zeros(options.tensors, 1, COLUMNS)
    load(few)  # code that is imported when it is first used
    with MemoryWatcher(LimitsProgram(options.program)) as watcher:
        opened = memory_of(watcher, lambda: rivals.ours("open")(options.source))
        fixed = memory_of(watcher, lambda: load(few))
        usage, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        loaded = memory_of(watcher, lambda: load(targets))
        seconds = time.perf_counter() - start
        ended = resource.getrusage(resource.RUSAGE_SELF)
    first = (options.world - options.rows) // 2
    wanted = torch.arange(first, first + options.rows, dtype=torch.float32)
    answer = {
        "open": opened,
        "fixed": fixed,
        "load": loaded,
        "seconds": seconds,
        "cpu": ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime,
        "right": bool((targets == wanted[None, :, None]).all()),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
