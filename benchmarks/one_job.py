"""A process that does one job once and prints a line of JSON about it.

``python -m benchmarks.one_job`` is started anew for every run, since what is measured is what a
process needs that has opened nothing yet: opens, memory, bytes from the disk. It does a tiny job of
the same kind first, so that code which is imported when it is first used is there. With WORLD_SIZE
in its environment it is one rank of several, which begin together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks import files, opens, rivals, states
from benchmarks.program import LimitsProgram, MemoryWatcher

Job = Callable[[states.State, Path, Path], None]
"""Called with the tensors to load into, the checkpoint, and where to write."""


def load_with_stock(state: states.State, source: Path, _: Path) -> None:
    """dcp.load, as all ranks or alone."""
    reader = HuggingFaceStorageReader(str(source))
    load(state, storage_reader=reader, no_dist=not dist.is_initialized())


def load_with_safetensors(state: states.State, source: Path, _: Path) -> None:
    """load_file of every file, then a copy per tensor."""
    for path in files.files_in(source):
        if path.suffix == ".safetensors":
            for name, tensor in load_file(path).items():
                if name in state:
                    state[name].copy_(tensor)


def load_with_ours(state: states.State, source: Path, _: Path) -> None:
    """torch_ckpt.load, as all ranks or alone."""
    no_dist = not dist.is_initialized()
    rivals.ours("load")(state, checkpoint_id=str(source), no_dist=no_dist)


def merge_with_stock(state: states.State, source: Path, target: Path) -> None:
    """Stock's consolidation into one file."""
    target.mkdir()
    consolidate_safetensors_files(str(source), str(target), dict.fromkeys(state, 1))


def merge_with_ours(state: states.State, source: Path, target: Path) -> None:
    """Our consolidation into one file."""
    merge = rivals.ours("consolidate_safetensors_files")
    merge(str(source), str(target), dict.fromkeys(state, 1))


JOBS: Mapping[str, Mapping[str, Job]] = {
    "load": {
        "DCP HF reader": load_with_stock,
        "safetensors load_file and copy_": load_with_safetensors,
        "ours, load": load_with_ours,
    },
    "merge": {"DCP consolidate": merge_with_stock, "ours": merge_with_ours},
}


def targets(path: Path) -> states.State:
    """Zeroed tensors as the file says: {name: [dtype, shape]}."""
    wanted = json.loads(path.read_text())
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in wanted.items()
    }


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of the bytes of up to 20 tensors."""
    found = {}
    for name in states.sample_names(state):
        flat = state[name].contiguous().view(-1).view(torch.uint8)
        found[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return found


def bytes_from_disk() -> int:
    """What this process has had read from storage until now, read ahead included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def barrier() -> None:
    """Of the ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def main(arguments: list[str]) -> int:
    """Does what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_job")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("contender")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--targets", type=Path, required=True)
    parser.add_argument("--warm", type=Path, required=True, help="a tiny checkpoint; w is float32")
    parser.add_argument("--out", type=Path, required=True, help="a directory; is made")
    parser.add_argument("--program", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    job = JOBS[options.job][options.contender]
    options.out.mkdir()
    tiny = {"w": torch.zeros(2)}
    job(tiny, options.warm, options.out / "warm")
    state = targets(options.targets)
    with MemoryWatcher(LimitsProgram(options.program)) as watcher:
        barrier()
        before, usage = watcher.begin(), resource.getrusage(resource.RUSAGE_SELF)
        opens.mark(opens.BEGIN)
        read = bytes_from_disk()
        start = time.perf_counter()
        job(state, options.source, options.out / "done")
        barrier()
        seconds = time.perf_counter() - start
        read = bytes_from_disk() - read
        opens.mark(opens.END)
        ended = resource.getrusage(resource.RUSAGE_SELF)
        extra = watcher.end() - before
    if options.job == "merge":
        state = rivals.read_safetensors(options.out / "done", state)
    answer = {
        "seconds": seconds,
        "cpu": ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime,
        "memory": extra,
        "disk": read,
        "digests": digests(state),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
