"""One rank of a training run that saves a step, or loads a base model.

``python -m benchmarks.training_rank`` is started once for each rank. Rank 0 prints a line of JSON:
seconds of the slowest rank, the CPU of all, and the most memory that all of them took beside the
state; of saves those of the second one, and what the first one took.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import files, processes, ranks, rivals
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.ranks import sync_everything
from benchmarks.training_jobs import (
    BACKGROUND,
    LOADS,
    STEPS,
    Saver,
    adamw,
    bytes_of,
    import_automodel,
    import_rivals,
    llama,
    sharded,
)


class Watch:
    """CPU of this rank and of what it has started, and on rank 0 the memory of all ranks and of
    what they have: some save in a process of their own."""

    def __init__(self, program: LimitsProgram) -> None:
        self._watcher: MemoryWatcher | None = None
        self._before = 0
        if dist.get_rank() == 0:  # the parent has started all ranks
            self._watcher = MemoryWatcher(program, tree=True, pid=os.getppid())
            self._before = self._watcher.begin()

    def cpu(self) -> float:
        return processes.cpu_seconds(self._watcher.pid if self._watcher else 0)

    def memory(self) -> float:
        """The most since it began, in bytes. Ends the watch."""
        if self._watcher is None:
            return 0.0
        with self._watcher:
            return float(self._watcher.end() - self._before)


def save_once(saver: Saver, step: int, watch: Watch) -> dict[str, float]:
    """One save between two barriers: until the step may change what is saved, until it is on the
    disk, and CPU seconds of this rank."""
    dist.barrier()
    cpu, start = watch.cpu(), time.perf_counter()
    futures = saver.save(step)
    blocked = time.perf_counter() - start
    for future in futures:
        future.result()
    if not saver.is_durable:
        sync_everything(saver.place(step))
    dist.barrier()
    return {
        "blocked": blocked,
        "seconds": time.perf_counter() - start,
        "cpu": watch.cpu() - cpu,
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
    watch = Watch(program)
    first = save_once(saver, 1, watch)
    dist.barrier()
    if dist.get_rank() == 0:
        files.remove(saver.place(1))
    last = save_once(saver, 2, watch)
    memory = watch.memory()
    found = sum(path.stat().st_size for path in files.files_in(saver.place(2)))
    if found < 3 * bytes_of(model):  # weights and two moments
        raise RuntimeError(f"{options.contender} has written {found} bytes, less than the state")
    saver.close()
    figures = last | {f"first_{name}": first[name] for name in ("blocked", "seconds")}
    return most(figures | {"memory": memory})


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
    watch = Watch(program)
    dist.barrier()
    cpu, start = watch.cpu(), time.perf_counter()
    LOADS[options.contender](model, options.path)
    dist.barrier()
    figures = {"seconds": time.perf_counter() - start, "cpu": watch.cpu() - cpu}
    figures["memory"] = watch.memory()
    with torch.no_grad():
        total = sum(float(p.full_tensor().float().abs().sum()) for p in model.parameters())
    if total != options.total:
        raise RuntimeError(f"{options.contender} loaded values of sum {total}, not {options.total}")
    return most(figures)


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
    ranks.say(answer)
    return 0


if __name__ == "__main__":
    ranks.leave(main(sys.argv[1:]))
