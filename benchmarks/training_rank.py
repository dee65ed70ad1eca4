"""One rank of a training run that saves a step, or loads a base model.

``python -m benchmarks.training_rank`` is started once for each rank. Rank 0 prints a line of JSON:
seconds of the slowest rank, the CPU of all, and the most memory that all of them took beside the
state; of saves those of the second one, and what the first one took.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import files, rivals
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.training_jobs import (
    BACKGROUND,
    LOADS,
    STEPS,
    Saver,
    adamw,
    import_automodel,
    import_rivals,
    llama,
    sharded,
    sync,
)


def cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def save_once(saver: Saver, step: int) -> dict[str, float]:
    """One save between two barriers: until the step may change what is saved, until it is on the
    disk, and CPU seconds of this rank."""
    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    future: Future[Any] | None = saver.save(step)
    blocked = time.perf_counter() - start
    if future is not None:
        future.result()
    if not saver.is_durable:
        sync(saver.place(step))
    dist.barrier()
    return {
        "blocked": blocked,
        "seconds": time.perf_counter() - start,
        "cpu": cpu_seconds() - cpu,
    }


def most(values: dict[str, float]) -> dict[str, float]:
    """Of all ranks the largest, but of CPU and memory the sum."""
    added = ("cpu", "memory")
    sums = torch.tensor([values.get(name, 0.0) for name in added], dtype=torch.float64)
    dist.all_reduce(sums)
    largest = torch.tensor([values[name] for name in values], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    answer = dict(zip(values, largest.tolist(), strict=True))
    return answer | dict(zip(added, sums.tolist(), strict=True))


def saves(options: argparse.Namespace, program: LimitsProgram) -> dict[str, float]:
    model = sharded(llama(options.scale, options.layers))
    optimizer = adamw(model)
    make = (STEPS if options.job == "step" else BACKGROUND)[options.contender]
    saver = make(model, optimizer, options.path)
    with MemoryWatcher(program) as watcher:
        before = watcher.begin()
        first = save_once(saver, 1)
        dist.barrier()
        if dist.get_rank() == 0:
            files.remove(saver.place(1))
        last = save_once(saver, 2)
        extra = watcher.end() - before
    saver.close()
    figures = last | {f"first_{name}": first[name] for name in ("blocked", "seconds")}
    return most(figures | {"memory": float(extra)})


def load(options: argparse.Namespace, program: LimitsProgram) -> dict[str, float]:
    model = llama(options.scale, options.layers)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    model = sharded(model)
    # A program imports what it loads with once, so that is not timed.
    if options.contender.startswith("ours"):
        rivals.ours("load_model")
    else:
        import_rivals()
    if "AutoModel" in options.contender:
        import_automodel()
    files.drop_from_memory(files.files_in(options.path))
    with MemoryWatcher(program) as watcher:
        dist.barrier()
        before = watcher.begin()
        cpu, start = cpu_seconds(), time.perf_counter()
        LOADS[options.contender](model, options.path)
        dist.barrier()
        seconds = time.perf_counter() - start
        figures = {"seconds": seconds, "cpu": cpu_seconds() - cpu}
        extra = watcher.end() - before
    with torch.no_grad():
        total = sum(float(p.full_tensor().float().abs().sum()) for p in model.parameters())
    if total != options.total:
        raise RuntimeError(f"{options.contender} loaded values of sum {total}, not {options.total}")
    return most(figures | {"memory": float(extra)})


def make_base(options: argparse.Namespace, _: LimitsProgram) -> dict[str, float]:
    """The base model on disk, and the sum by which a load of it is checked."""
    model = llama(options.scale, options.layers)
    model.save_pretrained(options.path)
    model = sharded(model)
    with torch.no_grad():
        total = sum(float(p.full_tensor().float().abs().sum()) for p in model.parameters())
    return {"total": total}


JOBS = {"step": saves, "background": saves, "base": load, "make_base": make_base}


def main(arguments: list[str]) -> int:
    """Saves or loads as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_rank")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("contender")
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--total", type=float, default=0.0)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = JOBS[options.job](options, LimitsProgram(options.program))
    if dist.get_rank() == 0:
        sys.stdout.write("\n" + json.dumps(answer) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # As export_rank.py, for torch's teardown after functional collectives.
    sys.stdout.flush()
    os._exit(status)
