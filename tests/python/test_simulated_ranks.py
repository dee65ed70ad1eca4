"""Saves by more ranks than a machine has room for: one process plays them all, one after the other,
on torch's process group of fakes. What ranks say to each other is handed over here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.final import final_tensors
from ranks.layouts import (
    Layout,
    check,
    layouts,
    mesh_of,
    odd_nesting,
    several_boxes,
    state,
    whole,
)
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageWriter, SavePlanner


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh_of.cache_clear()
    try:
        yield
    finally:
        mesh_of.cache_clear()
        dist.destroy_process_group()


def save(path: Path, world: int, table: dict[str, Layout], **options: Any) -> None:
    """What dcp.save does, in its order, for every rank in turn."""
    writers, planners, plans = [], [], []
    for rank in range(world):
        with as_rank(rank, world):
            writer = HuggingFaceStorageWriter(path, **options)
            planner = SavePlanner()
            writer.set_up_storage_writer(rank == 0, rank=rank)
            planner.set_up_planner(state(table), writer.storage_meta(), rank == 0)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            # On nodes of their own: those of one node would wait for each other.
            plans.append(dataclasses.replace(plan, storage_data=None))
        writers.append(writer)
        planners.append(planner)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for rank in range(world):
        with as_rank(rank, world):
            plan = planners[rank].finish_plan(plans[rank])
            results.append(writers[rank].write_data(plan, planners[rank]).wait())
    writers[0].finish(metadata, results)


def random_table(chance: random.Random, world: int) -> dict[str, Layout]:
    meshes = [(world,), (2, world // 2), (world // 2, 2), (2, 2, world // 4)]
    table = {}
    for number in range(12):
        ndim = chance.randint(1, 4)
        shape = tuple(chance.randint(1, 200 if ndim < 3 else 17) for _ in range(ndim))
        mesh = chance.choice(meshes)
        placements = tuple(
            Replicate() if chance.random() < 0.3 else Shard(chance.randrange(ndim)) for _ in mesh
        )
        table[f"t{number}"] = Layout(shape, mesh, placements)
    return table


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        *(("final", 8), ("final", 64), ("final", 256), ("sharded", 8), ("sharded", 64)),
        pytest.param("sharded", 256, marks=pytest.mark.campaign),
    ],
)
def test_any_layout_comes_back(tmp_path: Path, world: int, layout: Any) -> None:
    table = layouts(world) | several_boxes(world) | odd_nesting(world)
    table |= random_table(random.Random(world), world)
    path = tmp_path / "c"
    save(path, world, table, layout=layout, max_shard_size="50KB" if layout == "final" else None)
    assert os.listdir(tmp_path) == ["c"]
    if layout == "sharded":
        torch_ckpt.consolidate_safetensors_files(path, tmp_path / "merged", None)
        path = tmp_path / "merged"
    tensors = final_tensors(path)
    assert tensors.keys() == table.keys()
    for name, of_table in table.items():
        assert torch.equal(tensors[name], whole(name, of_table.shape)), name
    Checkpoint(path).verify()
    # Into another world, or this one, by the ranks that are most unlike.
    for other in (world, 12):
        wanted = layouts(other)
        for rank in (0, other // 2, other - 1):
            with as_rank(rank, other):
                target = state(wanted, blank=True)
                torch_ckpt.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
                check(target, wanted)
