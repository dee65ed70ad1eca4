"""How columns become rows: the exchanges along dimensions of a mesh, and what each rank gives to
each. All of it follows from shapes and placements, so that ranks need not tell each other.

Which boxes there are before and after the engine's rule of placements says; a piece is where two of
them overlap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ckpt.dcp.boxes import boxes_at
from torch_ckpt.dcp.rings import MIN_ROW_BYTES

Placements = tuple[Placement, ...]


class Step(NamedTuple):
    """An exchange along one dimension of a mesh."""

    mesh_dim: int
    before: Placements
    after: Placements


@functools.lru_cache(maxsize=4096)
def steps_of(
    shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], placements: Placements
) -> tuple[Step, ...]:
    """What makes long rows of a tensor's boxes; nothing if they have them, or cannot, or where a
    rank may have several boxes."""
    if 0 in shape or not all(type(one) in (Shard, Replicate, _StridedShard) for one in placements):
        return ()
    if not _has_one_box(shape, mesh, placements):
        return ()
    steps: list[Step] = []
    while True:
        cuts = _cuts(len(shape), mesh, placements)
        dim = _row_dim(shape, itemsize, cuts)
        if dim == 0:
            return tuple(steps)
        along = [
            at
            for at, one in enumerate(placements)
            if type(one) is Shard and one.dim == dim and mesh[at] > 1
        ]
        if not along:
            return ()  # strided columns
        mesh_dim = along[-1]  # what was cut last is put together first
        into = next((d for d in range(dim) if shape[d] >= cuts[d] * mesh[mesh_dim]), None)
        if into is None:
            return ()
        after = _cuts(len(shape), mesh[mesh_dim + 1 :], placements[mesh_dim + 1 :])[into]
        new = Shard(into) if after == 1 else _StridedShard(into, split_factor=after)
        placed = (*placements[:mesh_dim], new, *placements[mesh_dim + 1 :])
        if not _has_one_box(shape, mesh, placed):
            return ()
        steps.append(Step(mesh_dim, placements, placed))
        placements = placed


def _has_one_box(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Placements) -> bool:
    """Whether every rank has one box at most: strided shards are those of dimensions that later
    placements have cut before them, and evenly."""
    cuts = _cuts(len(shape), mesh, placements)
    for at, placement in enumerate(placements):
        if type(placement) is _StridedShard:
            later = _cuts(len(shape), mesh[at + 1 :], placements[at + 1 :])
            if placement.split_factor != later[placement.dim]:
                return False
            if shape[placement.dim] % cuts[placement.dim] != 0:
                return False
    return True


def _row_dim(shape: tuple[int, ...], itemsize: int, cuts: list[int]) -> int:
    """The dimension that cuts boxes into rows that are too short, or 0."""
    row = itemsize
    for dim in reversed(range(len(shape))):
        row *= -(-shape[dim] // cuts[dim])
        if cuts[dim] > 1:
            return dim if row < MIN_ROW_BYTES and math.prod(shape[:dim]) > 1 else 0
    return 0


def _cuts(ndim: int, mesh: tuple[int, ...], placements: Placements) -> list[int]:
    """In how many parts each dimension of a tensor is cut."""
    cuts = [1] * ndim
    for count, placement in zip(mesh, placements, strict=True):
        if not isinstance(placement, Replicate):
            cuts[placement.dim] *= count  # type: ignore[attr-defined]
    return cuts


class Pieces(NamedTuple):
    """What a rank gives to and gets from each rank along a dimension of a mesh, itself included, as
    slices of its local tensors before and after, of these shapes."""

    gives: tuple[tuple[slice, ...] | None, ...]
    gets: tuple[tuple[slice, ...] | None, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def pieces_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], step: Step, coordinate: tuple[int, ...]
) -> Pieces | None:
    """None where a rank has more than one box, or not what another one needs: not for a step of
    `steps_of`."""
    line = [
        (*coordinate[: step.mesh_dim], place, *coordinate[step.mesh_dim + 1 :])
        for place in range(mesh[step.mesh_dim])
    ]
    own = line.index(coordinate)
    boxes: list[list[_Box]] = []
    for placements in (step.before, step.after):
        found = [boxes_at(shape, mesh, placements, place) for place in line]
        if any(len(one) > 1 for one in found):
            return None
        none = _Box((0,) * len(shape), (0,) * len(shape))
        boxes.append([_Box(one[0].offsets, one[0].sizes) if one else none for one in found])
    before, after = boxes
    gives = tuple(before[own].part(box) for box in after)
    gets = tuple(after[own].part(box) for box in before)
    if _elements(gives) != math.prod(before[own].sizes):
        return None
    if _elements(gets) != math.prod(after[own].sizes):
        return None
    return Pieces(gives, gets, tuple(before[own].sizes), tuple(after[own].sizes))


def _elements(pieces: Iterable[tuple[slice, ...] | None]) -> int:
    return sum(math.prod(s.stop - s.start for s in piece) for piece in pieces if piece)


class _Box(NamedTuple):
    offsets: Sequence[int]
    sizes: Sequence[int]

    def part(self, other: _Box) -> tuple[slice, ...] | None:
        """Where `other` overlaps with it, as slices of this box."""
        slices = []
        for offset, size, its_offset, its_size in zip(*self, *other, strict=True):
            begin = max(offset, its_offset)
            end = min(offset + size, its_offset + its_size)
            if begin >= end:
                return None
            slices.append(slice(begin - offset, end - offset))
        return tuple(slices)
