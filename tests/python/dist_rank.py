"""One rank that saves or loads by torch_ckpt.megatron.dist_checkpointing, where one rank dies, or is
stopped, on its way.

    python dist_rank.py FOLDER JOB PHASE VICTIM kill|stop
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_ckpt.dcp.write.writer
import torch_ckpt.ranks.ranks
import torch_ckpt.ranks.transfers
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
TIMEOUT_S = 4.0


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


def arm(phase: str, how: str) -> None:
    owner, name = PHASES[phase]

    def fatal(*_: Any, **__: Any) -> Any:
        if how == "stop":  # and ended when the others have long given up
            end = f"import os, time; time.sleep({5 * TIMEOUT_S}); os.kill({os.getpid()}, 9)"
            subprocess.Popen([sys.executable, "-S", "-c", end])
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, fatal)


def main(folder: str, job: str, phase: str, victim: str, how: str) -> None:
    dist.init_process_group("gloo")
    path = Path(folder) / "c"
    dist_checkpointing.save(state(1.0), path)
    dist.barrier()
    if how == "stop":
        torch_ckpt.ranks.ranks._known.clear()  # connections that wait for ten minutes
        torch_ckpt.ranks.ranks.TIMEOUT_S = torch_ckpt.ranks.transfers.TIMEOUT_S = TIMEOUT_S
        torch_ckpt.ranks.ranks.timeout_of = lambda _: 0.0
    if dist.get_rank() == int(victim):
        arm(phase, how)
    began = time.monotonic()
    try:
        JOBS[job](path)
        said = ""
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    report = {"said": said, "seconds": time.monotonic() - began}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(report))
    others = [rank for rank in range(dist.get_world_size()) if rank != int(victim)]
    until = time.monotonic() + 60
    # Rank 0 has the store, which the others ask who is gone.
    while not all(Path(folder, f"{rank}.json").exists() for rank in others):
        assert time.monotonic() < until, "the others have not heard of it"
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
