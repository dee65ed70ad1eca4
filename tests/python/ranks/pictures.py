"""Saves of tensors in many shardings, with logs, for `torch-ckpt layout` and `timeline` to draw."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from ranks.run import Context, cases, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt

CASES, case = cases()


@case
def saves(context: Context) -> None:
    line = init_device_mesh("cpu", (context.world,))
    grid = init_device_mesh("cpu", (2, context.world // 2))
    state = {
        "rows": distribute_tensor(torch.randn(50, 20), line, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(16, 12), line, [Shard(1)]),
        "grid": distribute_tensor(torch.randn(11, 7), grid, [Shard(0), Shard(1)]),
        "line": distribute_tensor(torch.randn(1001), line, [Shard(0)]),
        "experts": distribute_tensor(torch.randn(8, 3, 32), grid, [Shard(0), Shard(2)]),
        "thin": distribute_tensor(torch.randn(1, 100_000), line, [Shard(1)]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "step": 7,
    }
    log = context.shared / f"log-{context.rank}.jsonl"
    torch_ckpt.save(state, context.shared / "sharded", log_path=log)
    began = [
        torch_ckpt.async_save(state, context.shared / f"async-{n}", log_path=log, on_busy="overlap")
        for n in range(2)
    ]
    for save in began:
        save.result()
    torch_ckpt.save(state, context.shared / "final", layout="final", log_path=log)
    # One file of all ranks.
    torch_ckpt.save(state, context.shared / "again", log_path=context.shared / "log.jsonl")


@case
def a_failed_save_is_logged_on_every_rank(context: Context) -> None:
    log = context.folder / f"log-{context.rank}.jsonl"
    what = {"leaf": object()} if context.rank == 1 else {"w": torch.ones(2)}
    error = raised(lambda: torch_ckpt.save(what, context.folder / "c", log_path=log), "leaf")
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    assert line["error"] == str(error)
    assert (line["rank"], line["path"]) == (context.rank, str(context.folder / "c"))
    dist.barrier()


@case
def a_log_that_is_no_path_fails_on_every_rank(context: Context) -> None:
    log = 7 if context.rank == 1 else context.folder / "log"
    raised(lambda: torch_ckpt.save({}, context.folder / "c", log_path=log), "PathLike")  # type: ignore[arg-type]
