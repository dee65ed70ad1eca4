"""Columns to rows: what ranks of any mesh give each other. With processes: ranks/redistributing.py."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ckpt.dcp.boxes import boxes_at
from torch_ckpt.dcp.rings import MIN_ROW_BYTES
from torch_ckpt.dcp.row_steps import Step, _Box, pieces_of, steps_of

Coordinate = tuple[int, ...]


def held(
    whole: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...], at: Coordinate
) -> torch.Tensor:
    """What a rank has of `whole`, which it has one box of, or nothing."""
    boxes = boxes_at(tuple(whole.shape), mesh, placements, at)
    assert len(boxes) <= 1
    if not boxes:
        return whole.new_empty((0,) * whole.dim())
    slices = zip(boxes[0].offsets, boxes[0].sizes, strict=True)
    return whole[tuple(slice(offset, offset + size) for offset, size in slices)]


def exchanged(
    whole: torch.Tensor, mesh: tuple[int, ...], step: Step
) -> dict[Coordinate, torch.Tensor]:
    """What every rank has after the step."""
    ranks = list(itertools.product(*map(range, mesh)))
    pieces = {at: pieces_of(tuple(whole.shape), mesh, step, at) for at in ranks}
    after = {}
    for at in ranks:
        mine = pieces[at]
        assert mine is not None
        after[at] = torch.full(mine.after, -1, dtype=whole.dtype)
        for place, gets in enumerate(mine.gets):
            other = (*at[: step.mesh_dim], place, *at[step.mesh_dim + 1 :])
            theirs = pieces[other]
            assert theirs is not None
            gives = theirs.gives[at[step.mesh_dim]]
            assert (gives is None) == (gets is None)
            if gets is not None and gives is not None:
                after[at][gets] = held(whole, mesh, step.before, other)[gives]
    return after


def some_placement(chance: random.Random, ndim: int) -> Placement:
    kind = chance.random()
    if kind < 0.2:
        return Replicate()
    dim = chance.randrange(ndim)
    return _StridedShard(dim, split_factor=chance.randint(2, 4)) if kind < 0.3 else Shard(dim)


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_gets_its_rows(seed: int) -> None:
    chance = random.Random(seed)
    done = 0
    for _ in range(40):
        mesh = tuple(chance.choice([1, 2, 3, 4, 5]) for _ in range(chance.randint(1, 3)))
        shape = tuple(chance.randint(1, 24) for _ in range(chance.randint(1, 4)))
        placements = tuple(some_placement(chance, len(shape)) for _ in mesh)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        steps = steps_of(shape, 8, mesh, placements)
        assert all(step.before == placements for step in steps[:1])
        for step in steps:
            after = exchanged(whole, mesh, step)
            done += 1
            for at, tensor in after.items():
                wanted = held(whole, mesh, step.after, at)
                assert tensor.numel() == wanted.numel() and torch.equal(
                    tensor.reshape(-1), wanted.reshape(-1)
                ), (shape, mesh, placements, step, at)
    assert done > 0


def test_what_is_redistributed_and_how() -> None:
    rows, columns = Shard(0), Shard(1)
    wide = MIN_ROW_BYTES // 4  # elements of a row that is long enough in two parts
    for shape, placements, after in [
        ((64, 64), (columns, Replicate()), (rows, Replicate())),
        ((64, 64), (rows, columns), (rows, rows)),
        ((64, 64), (columns, rows), (_StridedShard(0, split_factor=4), rows)),
        ((64, 64), (columns, columns), (_StridedShard(0, split_factor=4), rows)),
        # Which would be two boxes for some ranks.
        ((9, 64), (columns, rows), None),
        # Into a dimension that has enough for all ranks.
        ((1, 64, 64), (Shard(2), Replicate()), (columns, Replicate())),
        ((64, 64), (rows, rows), None),
        ((64, 8 * wide), (columns, Replicate()), None),
        ((3, 64), (Replicate(), columns), None),
        ((3, 64, 64), (Replicate(), Shard(2)), None),  # rows as short as before
        ((1, 64), (Replicate(), columns), None),  # one row
        ((64, 64), (Partial(), columns), None),
        ((64, 64), (_StridedShard(1, split_factor=2), Replicate()), None),
        ((0, 64), (columns, Replicate()), None),
        ((), (Replicate(), Replicate()), None),
    ]:
        steps = steps_of(shape, 4, (2, 4), placements)
        assert (steps[-1].after if steps else None) == after, (shape, placements)


def test_only_what_makes_rows_short_is_redistributed() -> None:
    """The middle of this tensor is cut as well, but into long pieces."""
    steps = steps_of((16, 64, MIN_ROW_BYTES // 2), 1, (2, 4), (Shard(1), Shard(2)))
    assert [step.mesh_dim for step in steps] == [1]
    assert steps[-1].after == (Shard(1), Shard(0))


def test_parts_of_boxes() -> None:
    box = _Box((2, 3), (4, 5))
    assert box.part(_Box((0, 4), (3, 2))) == (slice(0, 1), slice(1, 3))
    assert box.part(_Box((6, 3), (1, 1))) is None
