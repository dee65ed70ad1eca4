"""One rank of a program that saves or loads by Megatron Core's dist_checkpointing, its own or ours.

``python -m benchmarks.megatron_rank`` is started once for each rank, which loads once, or saves
twice: what a first save of a process costs besides, no later one does. Rank 0 prints a line of
JSON: how long the slowest rank took, for the last time and for the first, the CPU of all, the most
memory that all took beside the state, and what they read: bytes that they asked the kernel for, and
bytes that came from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as megatron
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import async_utils as megatron_queue

from benchmarks import files, rivals, states
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.reshard_rank import bytes_asked_for, bytes_from_disk
from torch_ckpt.megatron import dist_checkpointing as ours
from torch_ckpt.megatron.dist_checkpointing.strategies import async_utils as ours_queue

DTYPE = torch.bfloat16
LAYERS, WIDTH, INNER, WORDS = 7, 2048, 5632, 25600
State = dict[str, Any]
place = ShardedTensor.from_rank_offsets


def content(seed: int, shape: tuple[int, int], row: int = 0, column: int = 0) -> torch.Tensor:
    """The box at `row` and `column` of a matrix, whose elements their places say."""
    rows = (torch.arange(row, row + shape[0], dtype=torch.int32) * 31 + seed * 7919)[:, None]
    columns = torch.arange(column, column + shape[1], dtype=torch.int32) * 17
    return (rows + columns).to(torch.int16).view(DTYPE)


def merge(halves: list[torch.Tensor]) -> torch.Tensor:
    """As Megatron's factories do; its time is added up."""
    start = time.perf_counter()
    try:
        return torch.cat(halves)
    finally:
        _merging[0] += time.perf_counter() - start


_merging = [0.0]


def gpt(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """A GPT of 0.93 GB at full scale, cut as by tensor parallelism of at most 8: layers along an
    axis that is prepended, gate and up projection in one factory, norms on all ranks, an object a
    layer. Whole tensors are the same for any number of ranks."""

    def box(seed: int, shape: tuple[int, int], axis: int, first: int = 0) -> torch.Tensor:
        """Of a matrix of `shape`, from `first` on along `axis`, this rank's part of it."""
        sizes = [*shape]
        sizes[axis] //= world
        at = [0, 0]
        at[axis] = first + rank * sizes[axis]
        if not filled:
            return torch.zeros(*sizes, dtype=DTYPE)
        return content(seed, (sizes[0], sizes[1]), *at)

    width = 8 * max(1, states.scaled(WIDTH // 8, scale))
    state: State = {}
    for layer in range(LAYERS):

        def cut(name: str, data: torch.Tensor, axis: int, layer: int = layer) -> ShardedTensor:
            return place(
                f"decoder.layers.{name}",
                data,
                (0, layer, LAYERS),
                (1 + axis, rank, world),
                prepend_axis_num=1,
            )

        def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
            return [
                place(key, half, (0, rank + at * world, 2 * world), replica_id=replica)
                for at, half in enumerate(data.chunk(2))
            ]

        prefix = f"layers.{layer}"
        state[f"{prefix}.qkv"] = cut("qkv", box(layer, (3 * width, WIDTH), 0), 0)
        state[f"{prefix}.proj"] = cut("proj", box(layer + 100, (width, WIDTH), 1), 1)
        state[f"{prefix}.fc2"] = cut("fc2", box(layer + 200, (width, INNER), 1), 1)
        halves = [box(layer + 300, (INNER, width), 0, first) for first in (0, INNER)]
        state[f"{prefix}.fc1"] = ShardedTensorFactory(
            f"decoder.{prefix}.fc1", torch.cat(halves), build, merge
        )
        norm = content(layer + 400, (1, WIDTH))[0] if filled else torch.zeros(WIDTH, dtype=DTYPE)
        state[f"{prefix}.norm"] = place(f"decoder.{prefix}.norm", norm, replica_id=(0, rank, 0))
        state[f"{prefix}._extra_state"] = ShardedObject(
            f"decoder.{prefix}._extra_state", {"scale": layer}, (1,), (0,), (0, rank, 0)
        )
    for seed, name in enumerate(("embedding", "output")):
        state[name] = place(name, box(seed + 500, (WORDS, width), 0), (0, rank, world))
    return {**state, "iteration": 100, "args": {"lr": 1e-4}}


def many(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """5,000 tensors of 512 B that all ranks have."""
    value = float(filled)
    return {
        f"{n}": place(f"small.{n}", torch.full((128,), value), replica_id=rank)
        for n in range(max(1, round(5000 * scale)))
    }


def layers(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """96 layers of a matrix of 1 MiB, along an axis that is prepended, in rows of each rank's."""
    count, rows = max(1, round(96 * scale)), 1024 // world
    return {
        f"{layer}": place(
            "layers",
            content(layer, (rows, 512), rank * rows)
            if filled
            else torch.zeros(rows, 512, dtype=DTYPE),
            (0, layer, count),
            (1, rank, world),
            prepend_axis_num=1,
        )
        for layer in range(count)
    }


def apart(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """A matrix of which each rank has 20 boxes, with those of others between them."""
    rows = max(1, round(256 * scale))

    def box(at: int) -> torch.Tensor:
        return content(1, (rows, 2048), at * rows) if filled else torch.zeros(rows, 2048).to(DTYPE)

    places = range(rank, 20 * world, world)
    return {f"{at}": place("apart", box(at), (0, at, 20 * world)) for at in places}


def objects(rank: int, world: int, scale: float, *, filled: bool, count: int = 10_000) -> State:
    """So many objects that all ranks have."""
    return {
        f"{n}": ShardedObject(
            f"object.{n}", {"step": n, "name": "x"} if filled else None, (1,), (0,), rank
        )
        for n in range(max(1, round(count * scale)))
    }


STATES: dict[str, Callable[..., State]] = {
    "gpt": gpt,
    "layers": layers,
    "apart": apart,
    "many": many,
    "objects": objects,
    "more_objects": functools.partial(objects, count=50_000),
}


def tensors_in(state: State) -> dict[str, torch.Tensor]:
    """The data of all entries that have tensors."""
    return {
        name: entry.data
        for name, entry in state.items()
        if isinstance(getattr(entry, "data", None), torch.Tensor)
    }


def end_children() -> None:
    """Megatron's manager process stays when a save is over."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def begin_save(path: Path) -> None:
    """As Megatron's trainer does."""
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()


def end_save(package: Any, path: Path) -> None:
    """Durable, what Megatron has written as well: its files are not synced."""
    if package is megatron:
        dist.barrier()
        if dist.get_rank() == 0:
            files.make_durable(path)
    dist.barrier()


def save(package: Any, state: State, path: Path) -> dict[str, float]:
    begin_save(path)
    package.save(state, str(path))
    end_save(package, path)
    return {}


def save_beside(package: Any, state: State, path: Path) -> dict[str, float]:
    """In the background of a trainer that does nothing but poll. "blocked": what it waits for."""
    kinds = ours_queue if package is ours else megatron_queue
    queue = kinds.AsyncCallsQueue()
    begin_save(path)
    start = time.perf_counter()
    request = package.save(state, str(path), async_sharded_save=True)
    queue.schedule_async_request(request)
    blocked = time.perf_counter() - start
    while not queue.maybe_finalize_async_calls():
        time.sleep(0.002)
        dist.barrier()
    end_save(package, path)
    return {"blocked": blocked}


def measured(program: Path, works: Sequence[Callable[[], dict[str, float]]]) -> dict[str, float]:
    """What the last of `works` takes, between two barriers, of all ranks and of the processes that
    they start, and what it returns, of the slowest rank; "first..." is that of the first. Rank 0
    watches the memory of them all, through all of `works`."""
    with contextlib.ExitStack() as stack:
        watcher = None
        if dist.get_rank() == 0:
            watched = MemoryWatcher(LimitsProgram(program), True, os.getppid())
            watcher = stack.enter_context(watched)
        before = watcher.begin() if watcher is not None else 0
        taken = [_taken(work) for work in works]
        extra = watcher.end() - before if watcher is not None else 0
    sums = torch.tensor([*taken[-1].sums, float(extra)], dtype=torch.float64)
    dist.all_reduce(sums)
    found = dict(zip(("cpu", "read", "from_disk", "extra_memory"), sums.tolist(), strict=True))
    for prefix, each in (("first_", taken[0].slowest), ("", taken[-1].slowest)):
        most = torch.tensor([*each.values()], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found |= {prefix + key: value for key, value in zip(each, most.tolist(), strict=True)}
    return found


class _Taken(NamedTuple):
    """slowest: what is the most of all ranks; sums: what is of all together."""

    slowest: dict[str, float]
    sums: list[float]


def _taken(work: Callable[[], dict[str, float]]) -> _Taken:
    dist.barrier()
    before = _cpu(), bytes_asked_for(), bytes_from_disk()
    start = time.perf_counter()
    answer = work()
    dist.barrier()
    seconds = time.perf_counter() - start
    after = _cpu(), bytes_asked_for(), bytes_from_disk()
    return _Taken(
        {"seconds": seconds, **answer}, [b - a for a, b in zip(before, after, strict=True)]
    )


def _cpu() -> float:
    """Of this process, and of those that it has started."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = sum(each.ru_utime + each.ru_stime for each in used)
    return ended + sum(_cpu_of(child.pid) for child in multiprocessing.active_children())


def _cpu_of(pid: int | None) -> float:
    """Of a process that is there."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> int:
    """Saves or loads as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_rank")
    parser.add_argument("package", choices=("megatron", "ours"))
    parser.add_argument("job", choices=("save", "save_beside", "load"))
    parser.add_argument("--state", choices=STATES, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    # Megatron waits for the GPU, and asks which one it has.
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo")
    package = megatron if options.package == "megatron" else ours
    at = dist.get_rank(), dist.get_world_size(), options.scale
    state = STATES[options.state](*at, filled=options.job != "load")
    needed = sum(tensor.nbytes for tensor in tensors_in(state).values())  # Megatron changes it
    if options.job == "load":
        loaded: list[State] = []

        def load() -> dict[str, float]:
            loaded.append(package.load(state, str(options.path)))
            return {"merging": _merging[0]}

        answer = measured(options.program, [load])
        check(loaded[0], STATES[options.state](*at, filled=True))
    else:
        job = save if options.job == "save" else save_beside
        before = options.path.with_name("first")

        def first() -> dict[str, float]:
            return job(package, state, before)

        def again() -> dict[str, float]:
            return job(package, state, options.path)

        answer = measured(options.program, [first, again])
        if dist.get_rank() == 0:
            shutil.rmtree(before)
    total = torch.tensor([float(needed)], dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({**answer, "needed": total.item()}) + "\n")
    dist.barrier()
    sys.stdout.flush()
    end_children()
    os._exit(0)  # see ranks.leave: the teardown of torch 2.13 aborts now and then


def check(loaded: State, wanted: State) -> None:
    """Raises ValueError where what was loaded is not what was saved."""
    for name, tensor in tensors_in(wanted).items():
        found = loaded[name]
        if not torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)):
            raise ValueError(f"{name} is not what was saved")
    for name, entry in wanted.items():
        if isinstance(entry, ShardedObject) and loaded[name] != entry.data:
            raise ValueError(f"{name} is not what was saved")


if __name__ == "__main__":
    main(sys.argv[1:])
