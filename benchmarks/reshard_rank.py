"""One rank of a load into row shards of what one process saved; see row_reshard."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import rivals, states
from benchmarks.export_rank import part_of


def bytes_asked_for() -> int:
    """What this process has asked the kernel to read, in bytes, from files of any kind."""
    return _of_io("rchar")


def bytes_from_disk() -> int:
    """What the kernel has read from storage for it."""
    return _of_io("read_bytes")


def _of_io(wanted: str) -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == wanted:
            return int(value)
    raise OSError(f"/proc/self/io has no {wanted}")


def main(arguments: list[str]) -> int:
    """Loads, and prints what it took as a line of JSON, on rank 0 that of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard_rank")
    parser.add_argument("contender", choices=("stock", "ours"))
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--source", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = part_of(states.llama_1b(options.scale), 0)
    target = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    if options.contender == "ours":
        reader = rivals.ours("CheckpointReader")(options.source)
    else:
        reader = dcp.FileSystemReader(options.source)
    dist.barrier()
    asked, usage, start = bytes_asked_for(), resource.getrusage(resource.RUSAGE_SELF), time.time()
    dcp.load(target, storage_reader=reader)
    dist.barrier()
    seconds = time.time() - start
    ended = resource.getrusage(resource.RUSAGE_SELF)
    same = all(
        torch.equal(target[name].to_local().view(torch.uint8), tensor.to_local().view(torch.uint8))
        for name, tensor in wanted.items()
    )
    needed = sum(tensor.to_local().nbytes for tensor in wanted.values())
    cpu = ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime
    sums = torch.tensor([bytes_asked_for() - asked, needed, cpu, float(same)], dtype=torch.float64)
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        read, needed, cpu, right = sums.tolist()
        answer = {"seconds": seconds, "cpu": cpu, "read": read, "needed": needed}
        answer["right"] = right == dist.get_world_size()
        sys.stdout.write(json.dumps(answer) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see ranks.leave: the teardown of torch 2.13 aborts now and then


if __name__ == "__main__":
    main(sys.argv[1:])
