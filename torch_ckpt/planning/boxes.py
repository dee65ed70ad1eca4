"""The true boxes of a DTensor on this rank.

torch's own helper gives one (offsets, sizes) pair per rank, which is wrong where a rank's part is
not one interval: a lone `_StridedShard`, or uneven shards nested in one dimension. The engine's
rule gives them all; here it is asked once per (shape, mesh, placements, coordinate).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.native.torch_private import StridedShard, local_tensor, sharded_in_order


class LocalBox(NamedTuple):
    """An interval of the global tensor, and where its first element stands in the local one."""

    offsets: torch.Size
    sizes: torch.Size
    local_offset: tuple[int, ...]


def local_boxes(tensor: DTensor, fqn: str) -> tuple[LocalBox, ...]:
    """The boxes of `tensor` that this rank holds; none where it holds nothing.

    A tensor without elements is one empty box on every rank, so that it is written at all.
    Raises UnsupportedError naming `fqn` for placements that say no boxes, Partial among them.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    try:
        rule = _rule(tuple(tensor.placements))
    except _NoBoxes as error:
        raise UnsupportedError(
            f"{fqn}: a DTensor with placement {error} holds no boxes of the tensor; "
            "redistribute it to Shard or Replicate first"
        ) from None
    if len(rule) > 1 and not sharded_in_order(tensor):
        raise UnsupportedError(
            f"{fqn}: a DTensor whose mesh dimensions shard one of its own in another order than "
            "from left to right; redistribute it first"
        )
    shape = tensor.shape
    if 0 in shape:
        zeros = (0,) * len(shape)
        return (LocalBox(torch.Size(zeros), shape, zeros),)
    return _expand(shape, tuple(tensor.device_mesh.shape), rule, tuple(coordinate))


def local_part(tensor: DTensor, box: LocalBox) -> torch.Tensor:
    """The part of the local tensor that holds `box`: a view, without autograd history."""
    local = local_tensor(tensor)
    if local.shape == box.sizes:
        return local
    with torch.no_grad():
        if 0 in box.sizes:
            return local.new_empty(box.sizes)
        for dim, (start, size) in enumerate(zip(box.local_offset, box.sizes, strict=True)):
            if local.shape[dim] != size:
                local = local.narrow(dim, start, size)
        return local


class _NoBoxes(Exception):
    """Carries the name of the placement."""


@functools.lru_cache(maxsize=1024)
def _rule(placements: tuple[Placement, ...]) -> tuple[tuple[Any, ...], ...]:
    rule: list[tuple[Any, ...]] = []
    for placement in placements:
        if isinstance(placement, StridedShard):
            rule.append(("strided_shard", placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            rule.append(("shard", placement.dim))
        elif isinstance(placement, Replicate):
            rule.append(("replicate",))
        else:
            raise _NoBoxes(repr(placement))
    return tuple(rule)


@functools.lru_cache(maxsize=65536)
def _expand(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    rule: tuple[tuple[Any, ...], ...],
    coordinate: tuple[int, ...],
) -> tuple[LocalBox, ...]:
    from torch_ckpt.native import core  # late: planning plain tensors needs no library

    placements = [
        {"kind": kind, **dict(zip(("dim", "split_factor"), arguments, strict=False))}
        for kind, *arguments in rule
    ]
    reply = core.call(
        {
            "op": "expand_rule",
            "shape": list(shape),
            "mesh": list(mesh),
            "placements": placements,
            "coordinate": list(coordinate),
        }
    )
    return tuple(
        LocalBox(torch.Size(box["offsets"]), torch.Size(box["sizes"]), tuple(box["local_offset"]))
        for box in reply["boxes"]
    )
