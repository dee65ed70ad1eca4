"""One rank of a program that saves or loads by Megatron Core's dist_checkpointing, its own or ours.

``python -m benchmarks.megatron_rank`` is started once for each rank. Rank 0 prints a line of JSON:
how long the slowest rank took, the CPU of all, the most memory that all took beside the state, and
the bytes that they asked the kernel to read, of those that they needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as megatron
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from benchmarks import files, rivals, states
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.reshard_rank import bytes_asked_for
from torch_ckpt.megatron import dist_checkpointing as ours

DTYPE = torch.bfloat16
LAYERS, WIDTH, INNER, WORDS = 7, 2048, 5632, 25600
State = dict[str, Any]
place = ShardedTensor.from_rank_offsets


def gpt(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """A GPT of 0.98 GB at full scale, cut as by tensor parallelism: layers along an axis that is
    prepended, gate and up projection in one factory, norms on all ranks, an object a layer."""
    own = torch.Generator().manual_seed(1 + rank)
    common = torch.Generator().manual_seed(0)  # of what all ranks have

    def made(*shape: int, generator: torch.Generator = own) -> torch.Tensor:
        if not filled:
            return torch.zeros(shape, dtype=DTYPE)
        return torch.randint(0, 256, (*shape, 2), dtype=torch.uint8, generator=generator).view(
            DTYPE
        )[..., 0]

    width = states.scaled(WIDTH, scale)
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
        state[f"{prefix}.qkv"] = cut("qkv", made(3 * width // world, WIDTH), 0)
        state[f"{prefix}.proj"] = cut("proj", made(width, WIDTH // world), 1)
        state[f"{prefix}.fc2"] = cut("fc2", made(width, INNER // world), 1)
        state[f"{prefix}.fc1"] = ShardedTensorFactory(
            f"decoder.{prefix}.fc1", made(2 * (INNER // world), width), build, torch.cat
        )
        state[f"{prefix}.norm"] = place(
            f"decoder.{prefix}.norm", made(WIDTH, generator=common), replica_id=(0, rank, 0)
        )
        state[f"{prefix}._extra_state"] = ShardedObject(
            f"decoder.{prefix}._extra_state", {"scale": layer}, (1,), (0,), (0, rank, 0)
        )
    for name in ("embedding", "output"):
        state[name] = place(name, made(WORDS // world, width), (0, rank, world))
    return {**state, "iteration": 100, "args": {"lr": 1e-4}}


def many(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """5,000 tensors of 512 B that all ranks have."""
    value = float(filled)
    return {
        f"{n}": place(f"small.{n}", torch.full((128,), value), replica_id=rank)
        for n in range(max(1, round(5000 * scale)))
    }


def objects(rank: int, world: int, scale: float, *, filled: bool) -> State:
    """10,000 objects that all ranks have."""
    return {
        f"{n}": ShardedObject(
            f"object.{n}", {"step": n, "name": "x"} if filled else None, (1,), (0,), rank
        )
        for n in range(max(1, round(10_000 * scale)))
    }


STATES: dict[str, Callable[..., State]] = {"gpt": gpt, "many": many, "objects": objects}


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


def save(package: Any, state: State, path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    package.save(state, str(path))
    if package is megatron:  # whose files are not synced
        dist.barrier()
        if dist.get_rank() == 0:
            files.make_durable(path)
    dist.barrier()


def measured(program: Path, work: Callable[[], Any]) -> dict[str, float]:
    """What `work` takes, between two barriers, of all ranks."""
    with MemoryWatcher(LimitsProgram(program)) as watcher:
        dist.barrier()
        before, asked = watcher.begin(), bytes_asked_for()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        work()
        dist.barrier()
        seconds = time.perf_counter() - start
        ended = resource.getrusage(resource.RUSAGE_SELF)
        extra = watcher.end() - before
    cpu = ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime
    sums = torch.tensor([cpu, float(extra), bytes_asked_for() - asked], dtype=torch.float64)
    dist.all_reduce(sums)
    names = ("cpu", "extra_memory", "read")
    return {"seconds": seconds, **dict(zip(names, sums.tolist(), strict=True))}


def main(arguments: list[str]) -> int:
    """Saves or loads as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_rank")
    parser.add_argument("package", choices=("megatron", "ours"))
    parser.add_argument("job", choices=("save", "load"))
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
    state = STATES[options.state](*at, filled=options.job == "save")
    needed = sum(tensor.nbytes for tensor in tensors_in(state).values())  # Megatron changes it
    if options.job == "save":
        answer = measured(options.program, lambda: save(package, state, options.path))
    else:
        loaded: list[State] = []
        answer = measured(
            options.program, lambda: loaded.append(package.load(state, str(options.path)))
        )
        check(loaded[0], STATES[options.state](*at, filled=True))
    total = torch.tensor([float(needed)], dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({**answer, "needed": total.item()}) + "\n")
    dist.barrier()
    sys.stdout.flush()
    end_children()
    os._exit(0)  # as export_rank: the teardown of torch 2.13 aborts now and then


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
