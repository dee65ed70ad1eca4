"""DTensors of every layout, all of known content, for meshes of any world size."""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# "cuda": tensors of all ranks are on the first device.
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
if DEVICE == "cuda":
    torch.cuda.set_device(0)
    torch.cuda.init()  # or a mesh takes the device of each local rank


class Layout(NamedTuple):
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The content of tensor `name`, the same on every rank and in every launch."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(DEVICE, shape)


def layouts(world: int) -> dict[str, Layout]:
    """Layouts that torch's planners know, by the tensor's name. The shapes do not depend on the
    world size: a tensor saved by one world is loaded by another."""
    table = {
        "rows": Layout((12, 5), (world,), (Shard(0),)),
        "columns": Layout((3, 24), (world,), (Shard(1),)),
        "uneven": Layout((7, 3), (world,), (Shard(0),)),
        "few_rows": Layout((2, 3), (world,), (Shard(0),)),  # empty shards from 3 ranks on
        "one_row": Layout((1, 9), (world,), (Shard(0),)),
        "middle": Layout((2, 9, 3), (world,), (Shard(1),)),
        "replicated": Layout((4, 4), (world,), (Replicate(),)),
        "scalar": Layout((), (world,), (Replicate(),)),
        "empty": Layout((0, 4), (world,), (Shard(0),)),
        "large": Layout((129, 1031), (world,), (Shard(0),)),
        "cube": Layout((5, 6, 7), (1, world, 1), (Replicate(), Shard(1), Shard(0))),
    }
    if world % 2 == 0:
        half = (2, world // 2)
        table["grid"] = Layout((8, 6), half, (Shard(0), Shard(1)))
        table["hsdp"] = Layout((9, 4), half, (Replicate(), Shard(0)))
        table["nested"] = Layout((16, 3), half, (Shard(0), Shard(0)))
        table["fsdp_tp"] = Layout((16, 6), half, (_StridedShard(0, split_factor=half[1]), Shard(0)))
        table["three"] = Layout((8, 6), (1, *half), (Replicate(), Shard(0), Shard(1)))
        table["three_rows"] = Layout((10, 12), (2, 1, half[1]), (Shard(1), Shard(0), Shard(0)))
    else:
        for name, shape in (
            *(("grid", (8, 6)), ("hsdp", (9, 4)), ("nested", (16, 3)), ("fsdp_tp", (16, 6))),
            *(("three", (8, 6)), ("three_rows", (10, 12))),
        ):
            table[name] = Layout(shape, (world,), (Shard(len(name) % 2),))
    return table


# Parts of several boxes, which only our planners can say.
def several_boxes(world: int) -> dict[str, Layout]:
    table = {"strided": Layout((8 * world, 3), (world,), (_StridedShard(0, split_factor=4),))}
    table["strided_columns"] = Layout((3, 12), (world,), (_StridedShard(1, split_factor=2),))
    return table


# Sizes that the mesh does not divide: torch's planners may or may not be right about them.
def odd_nesting(world: int) -> dict[str, Layout]:
    if world % 2:
        return {}
    half = (2, world // 2)
    return {
        "nested_uneven": Layout((7, 3), half, (Shard(0), Shard(0))),
        "nested_few": Layout((3, 3), half, (Shard(0), Shard(0))),
        "fsdp_tp_uneven": Layout((10, 6), half, (_StridedShard(0, split_factor=half[1]), Shard(0))),
        "fsdp_tp_few": Layout((3, 6), half, (_StridedShard(0, split_factor=half[1]), Shard(0))),
    }


def part_of(tensor: torch.Tensor, dim: int, rank: int, count: int) -> torch.Tensor:
    """Chunk `rank` of `count`, which may be empty."""
    chunks = tensor.chunk(count, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def local_of(name: str, layout: Layout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's part, by torch's own distribution; lone strided shards by hand."""
    tensor, mesh = whole(name, layout.shape, dtype).to(DEVICE), mesh_of(layout.mesh)
    first = layout.placements[0]
    if len(layout.placements) == 1 and isinstance(first, _StridedShard):
        pieces = tensor.chunk(first.split_factor, first.dim)
        rank, count = mesh.get_local_rank(), mesh.size()
        return torch.cat([part_of(piece, first.dim, rank, count) for piece in pieces], first.dim)
    if any(isinstance(placement, _StridedShard) for placement in layout.placements):
        # FSDP2 over TP: rows are divided by the inner mesh dimension first, then by the outer.
        inner = part_of(tensor, 0, mesh.get_local_rank(1), mesh.size(1))
        return part_of(inner, 0, mesh.get_local_rank(0), mesh.size(0))
    made = distribute_tensor(tensor, mesh, list(layout.placements), src_data_rank=None)
    return made.to_local()


def dtensor(
    name: str, layout: Layout, *, blank: bool = False, dtype: torch.dtype = torch.float32
) -> DTensor:
    """Tensor `name` in this layout; with `blank`, of other content."""
    # A clone: torch 2.13 cannot stage a DTensor whose local tensor begins inside its storage.
    local = local_of(name, layout, dtype).clone(memory_format=torch.contiguous_format)
    if blank:
        local = torch.full_like(local, -77)
    stride = whole(name, layout.shape).stride()
    return DTensor.from_local(
        local,
        mesh_of(layout.mesh),
        list(layout.placements),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=stride,
    )


def state(table: dict[str, Layout], *, blank: bool = False) -> dict[str, DTensor]:
    return {name: dtensor(name, layout, blank=blank) for name, layout in table.items()}


def check(loaded: dict[str, Any], table: dict[str, Layout]) -> None:
    """Every local part is what it must be, bit for bit."""
    wrong = []
    for name, layout in table.items():
        value = loaded[name]
        got = value.to_local() if isinstance(value, DTensor) else value
        wanted = local_of(name, layout)
        if got.shape != wanted.shape or not torch.equal(got, wanted):
            wrong.append(name)
    assert not wrong, wrong
