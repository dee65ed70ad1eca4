"""One rank that loads a base model into FSDP2.

``python -m benchmarks.bases_rank`` is started once for each rank. Rank 0 prints a line of JSON:
seconds of the slowest rank, the CPU of all, and the most memory that all took beside the model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import bases, files, ranks, rivals
from benchmarks.program import LimitsProgram
from benchmarks.training_rank import Watch, most


def checksum(model: nn.Module) -> float:
    """A sum of what this rank has, and of the others."""
    own = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        value = parameter.detach()
        own += (value.to_local() if isinstance(value, DTensor) else value).double().abs().sum()
    dist.all_reduce(own)
    return float(own)


def main(arguments: list[str]) -> int:
    """Loads as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bases_rank")
    parser.add_argument("contender", choices=bases.LOADS)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--core", type=int, help="all threads on this one")
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    dist.init_process_group("gloo")
    model = bases.model_of(options.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    load = bases.LOADS[options.contender]
    rivals.ours("load_model")  # a program imports what it loads with once: that is not timed
    found = files.files_in(options.path)
    (files.bring_into_memory if options.warm else files.drop_from_memory)(found)
    watch = Watch(LimitsProgram(options.program))
    dist.barrier()
    cpu, start = watch.cpu(), time.perf_counter()
    load(model, options.path)
    dist.barrier()
    figures = {"seconds": time.perf_counter() - start, "cpu": watch.cpu() - cpu}
    figures["memory"] = watch.memory()
    answer = most(figures) | {"sum": checksum(model)}
    ranks.say(answer)
    return 0


if __name__ == "__main__":
    ranks.leave(main(sys.argv[1:]))
