"""One rank that saves or loads by torch_ckpt.megatron.dist_checkpointing, where one rank dies, or is
stopped, on its way.

    python dist_rank.py FOLDER JOB PHASE VICTIM kill|stop
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dying
import torch
import torch.distributed as dist

import torch_ckpt.dcp.write.writer
from torch_ckpt.dcp.node import Node
from torch_ckpt.megatron import deliveries, dist_checkpointing, loading, saving
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch_ckpt.native import operators

# Where a rank is when the function is called.
PHASES: dict[str, tuple[Any, str]] = {
    "said": (saving, "_said"),
    "settled": (saving, "check_layouts"),
    "collected": (saving, "_tensors"),
    "staged": (operators, "stage"),
    "written": (operators, "write"),
    "committed": (torch_ckpt.dcp.write.writer.HuggingFaceStorageWriter, "finish"),
    "asked": (loading, "Stored"),
    "checked": (loading, "check_layouts"),
    "placed": (loading, "_targets"),
    "read": (operators, "read"),
    "sent": (deliveries, "transfer"),
    "answered": (loading.Request, "answer"),
}


def state(value: float) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "own": ShardedTensor.from_rank_offsets(
            "own", torch.full((1000,), value + rank), (0, rank, world)
        ),
        "all": ShardedTensor.from_rank_offsets("all", torch.full((500,), value), replica_id=rank),
        "step": int(value),
    }


def save_beside(path: Path) -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(dist_checkpointing.save(state(2.0), path, async_sharded_save=True))
    queue.close()


def load(path: Path) -> None:
    loading.this_node = lambda: Node("boot", str(dist.get_rank()), 0)  # each rank has its own
    dist_checkpointing.load(state(0.0), path, FullyParallelLoadStrategyWrapper(None))


JOBS = {
    "save": lambda path: dist_checkpointing.save(
        state(2.0), path, FullyParallelSaveStrategyWrapper(None)
    ),
    "save_beside": save_beside,
    "load": load,
}


def main(folder: str, job: str, phase: str, victim: str, how: str) -> None:
    dist.init_process_group("gloo")
    path = Path(folder) / "c"
    dist_checkpointing.save(state(1.0), path)
    dist.barrier()
    if how == "stop":
        dying.wait_less()
    if dist.get_rank() == int(victim):
        dying.arm(*PHASES[phase], how)
    dying.run(lambda: JOBS[job](path), Path(folder), int(victim))


if __name__ == "__main__":
    main(*sys.argv[1:])
