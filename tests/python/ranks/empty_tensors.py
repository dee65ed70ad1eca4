"""DTensors without elements, sharded in every dimension, through torch's planners and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.differing import Warnings
from ranks.run import Context, cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

CASES, case = cases()
SHAPES = [(0, 8), (8, 0), (0, 0), (4, 0, 6), (0, 1)]


def shapes() -> dict[str, tuple[tuple[int, ...], Any]]:
    table: dict[str, Any] = {
        f"{'x'.join(map(str, shape))} {placement}": (shape, placement)
        for shape in SHAPES
        for placement in [Replicate(), *map(Shard, range(len(shape)))]
    }
    return {**table, "full": ((4, 8), Shard(1))}


def state(fill: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(torch.full(shape, fill), mesh, [placement])
        for name, (shape, placement) in shapes().items()
    }


def loads(path: Path) -> None:
    for planner in (dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner):
        target = state(0)
        reader = HuggingFaceStorageReader(path)
        with Warnings() as log:
            dcp.load(target, storage_reader=reader, planner=planner())
        assert log.texts == []
        assert target["full"].to_local().eq(3).all()
    whole = {name: torch.zeros(shape) for name, (shape, _) in shapes().items()}
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(path))
    assert whole["full"].eq(3).all()


def saves(context: Context, planner: Any, **options: Any) -> None:
    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, **options)
    dcp.save(state(3), storage_writer=writer, planner=planner)
    if context.rank == 0:
        checkpoint = torch_ckpt.Checkpoint(path)
        checkpoint.verify()
        saved = {tensor.name: tensor.shape for tensor in checkpoint.describe().tensors}
        assert saved == {name: shape for name, (shape, _) in shapes().items()}
    dist.barrier()
    loads(path)


@case
def shards_of_stocks_planner(context: Context) -> None:
    saves(context, dcp.DefaultSavePlanner(), save_distributed=True)


@case
def shards_of_our_planner(context: Context) -> None:
    saves(context, torch_ckpt.SavePlanner(), save_distributed=True)


@case
def final_files_of_stocks_planner(context: Context) -> None:
    saves(context, dcp.DefaultSavePlanner(), layout="final")


@case
def consolidated_files_of_stocks_planner(context: Context) -> None:
    saves(context, dcp.DefaultSavePlanner(), save_distributed=True, enable_consolidation=True)
