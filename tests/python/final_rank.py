"""python final_rank.py PATH: one rank of a save of columns, and of small tensors in a row, into final
files."""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt

ENDED = 7  # exit status after an error
ROWS = 1 << 18
SMALL = 100


def columns(rank: int) -> torch.Tensor:
    """A rank's part: 64 bytes of each row, 16 MiB in all."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-999, 999, (ROWS, 16), generator=generator, dtype=torch.int32)


def small(rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of tensors that are one row of the file each: 1200 bytes."""
    return {
        f"small.{i}": torch.full((300,), 1000 * rank + i, dtype=torch.int32) for i in range(SMALL)
    }


def main() -> int:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    parts = {"w": (columns(rank), 1)} | {name: (part, 0) for name, part in small(rank).items()}
    state = {
        name: DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
        for name, (part, dim) in parts.items()
    }
    try:
        metadata = torch_ckpt.save(state, checkpoint_id=sys.argv[1], layout="final")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return ENDED
    phases = metadata.storage_data[rank]
    print(phases.ring_bytes, phases.spill_bytes, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a group with a dead rank cannot be destroyed in peace
