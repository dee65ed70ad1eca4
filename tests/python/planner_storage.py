"""Planners of several ranks in one process, and a storage that holds what they plan in memory."""

from __future__ import annotations

import io
import pickle

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    WriteItemType,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.planning.per_rank import PerRank


class as_rank:
    """A process group of `world` ranks in which this process is `rank` and nobody else exists."""

    def __init__(self, rank, world):
        self.arguments = {"rank": rank, "world_size": world}

    def __enter__(self):
        dist.init_process_group("fake", store=FakeStore(), **self.arguments)

    def __exit__(self, *_):
        dist.destroy_process_group()


def world_of(mesh):
    return torch.Size(mesh).numel()


def dtensor(full, mesh_shape, placements):
    """The DTensor of `full` on this rank, its local part cut by torch's own placements."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    local = full
    for dim, (placement, place) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, mesh_shape[dim], with_padding=False)
            local = parts[place]
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


class Storage:
    """What a storage writer and reader do, in memory."""

    def __init__(self):
        self.data = {}
        self.metadata = None

    def save(self, states, make=SavePlanner, world=None, **kwargs):
        """Save states[r], a function of no arguments, as rank r of len(states); with `world` the
        planners take themselves for ranks of that one."""
        planners, plans = [], []
        for rank, state in enumerate(states):
            with as_rank(rank, world or len(states)):
                planner = make(**kwargs)
                planner._cached_plans_key = f"rank {rank}"  # one process plays all ranks
                planner.set_up_planner(state(), None, rank == 0)
                plans.append(planner.create_local_plan())
                planners.append(planner)
        plans = pickle.loads(pickle.dumps(plans))
        plans, self.metadata = planners[0].create_global_plan(plans)
        self.plans, self.sent = [], plans
        for planner, plan in zip(planners, plans, strict=True):
            plan = planner.finish_plan(pickle.loads(pickle.dumps(plan)))
            self.plans.append(plan)
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    self.data[item.index] = planner.resolve_data(item).getvalue()
                else:
                    data = planner.resolve_data(item)
                    assert data.shape == item.tensor_data.chunk.sizes
                    self.data[item.index] = data.detach().clone()
        self.metadata = pickle.loads(pickle.dumps(self.metadata))
        return self

    def load(self, state, make=LoadPlanner, rank=0, world=1, **kwargs):
        """Fill the state that the function `state` makes as `rank` of `world`; return it."""
        with as_rank(rank, world):
            target = state()
            planner = make(**kwargs)
            planner.set_up_planner(target, self.metadata, rank == 0)
            plan = planner.create_global_plan([planner.create_local_plan()])[0]
            for item in planner.finish_plan(plan).items:
                stored = self.data[item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(stored))
                    continue
                part = stored
                for dim, (start, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, size)
                tensor = planner.resolve_tensor(item).detach()
                assert tensor.shape == part.shape
                tensor.copy_(part)
                planner.commit_tensor(item, tensor)
        return target

    def whole(self, fqn):
        """The tensor `fqn`, put together from its chunks; every element must come exactly once."""
        entry = self.metadata.state_dict_metadata[fqn]
        full = torch.zeros(entry.size, dtype=entry.properties.dtype)
        count = torch.zeros(entry.size)
        for chunk in entry.chunks:
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            full[where] = self.data[MetadataIndex(fqn, chunk.offsets)]
            count[where] += 1
        assert torch.equal(count, torch.ones(entry.size))
        return full


def same(a, b):
    """Whether two states are equal in values and types, and their mappings in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, PerRank):
        return same(a.value, b.value)
    return a == b
