"""Do the entries of all ranks make whole tensors and objects? Rank 0 is told, and says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch

from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.boxes import Box, Cell, Numbers
from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.native import core

_SHOWN = 10  # words in a message


class BoxLayout(NamedTuple):
    """A Box without its memory. held: whether it has any."""

    key: str
    dtype: torch.dtype
    shape: Numbers
    offset: Numbers
    sizes: Numbers
    grid: Numbers | None
    main: bool
    held: bool

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def words(self) -> str:
        return f"{list(self.sizes)} at {list(self.offset)} of {list(self.shape)}"


class CellLayout(NamedTuple):
    """A Cell without its value."""

    key: str
    shape: Numbers
    offset: Numbers
    main: bool
    name: str


class RankLayout(NamedTuple):
    """What one rank has, or asks for."""

    boxes: list[BoxLayout]
    cells: list[CellLayout]

    def keys(self) -> set[str]:
        return {box.key for box in self.boxes} | {cell.key for cell in self.cells}

    @staticmethod
    def of(boxes: Iterable[Box], cells: Iterable[Cell]) -> RankLayout:
        return RankLayout(
            [
                BoxLayout(
                    *(b.key, b.dtype, b.shape, b.offset, b.sizes, b.grid, b.main),
                    b.data is not None and not b.data.is_meta,
                )
                for b in boxes
            ],
            [CellLayout(c.key, c.shape, c.offset, c.main, c.name) for c in cells],
        )


def check_layouts(ranks: Sequence[RankLayout], *, whole: bool, replicas: bool) -> None:
    """Raise CheckpointingException, which names key, box and ranks, where tensors or objects of all
    `ranks` are not what each other say; with `whole`, where the main replicas do not make whole
    tensors and grids of objects; with `replicas`, where a part or an object has several."""
    tensors: dict[str, list[tuple[int, BoxLayout]]] = {}
    objects: dict[str, list[tuple[int, CellLayout]]] = {}
    names: dict[str, int] = {}  # of objects: their keys, and under which each is stored
    for rank, layout in enumerate(ranks):
        for box in layout.boxes:
            tensors.setdefault(box.key, []).append((rank, box))
        for cell in layout.cells:
            objects.setdefault(cell.key, []).append((rank, cell))
            names.setdefault(cell.key, rank)
            names.setdefault(cell.name, rank)
    for key in sorted(tensors.keys() & names.keys()):
        raise CheckpointingException(
            f"is a tensor on rank {tensors[key][0][0]} and an object on rank {names[key]}",
            tensor=key,
        )
    for key, boxes in tensors.items():
        _check_alike(key, boxes)
        if whole:
            _check_tiled(key, boxes, replicas)
    for key, cells in objects.items():
        _check_cells(key, cells, whole, replicas)


def check_stored(ranks: Sequence[RankLayout]) -> None:
    """Raise CheckpointingException, which names the key, where no rank would store any of it."""
    keys = set[str]().union(*(layout.keys() for layout in ranks))
    for layout in ranks:
        stored = (box for box in layout.boxes if box.main)
        keys -= {box.key for box in stored if box.elements or not math.prod(box.shape)}
        keys -= {cell.key for cell in layout.cells if cell.main}
    for key in sorted(keys):
        having = in_words(rank for rank, layout in enumerate(ranks) if key in layout.keys())
        raise CheckpointingException(
            f"no rank is the main replica of any of it; replicas are on {having}", tensor=key
        )


def _check_alike(key: str, boxes: list[tuple[int, BoxLayout]]) -> None:
    first_rank, first = boxes[0]
    for rank, box in boxes[1:]:
        differs = (
            box.dtype != first.dtype
            or box.shape != first.shape
            or box.grid != first.grid
            or (box.grid is not None and box.sizes != first.sizes)
        )
        if differs:
            raise CheckpointingException(
                f"ranks {first_rank} and {rank} disagree: {_said(first)}, and {_said(box)}",
                tensor=key,
            )


def _said(box: BoxLayout) -> str:
    grid = "boxes of any sizes"
    if box.grid is not None:
        grid = f"a grid of {list(box.grid)} boxes of {list(box.sizes)}"
    return f"{box.dtype} of {list(box.shape)} in {grid}"


def _check_tiled(key: str, boxes: list[tuple[int, BoxLayout]], replicas: bool) -> None:
    rank, first = boxes[0]
    whole = math.prod(first.shape)
    if first.grid is not None:
        made = tuple(n * size for n, size in zip(first.grid, first.sizes, strict=True))
        if made != first.shape:
            raise CheckpointingException(
                f"is {_said(first)} on rank {rank}, which make {list(made)}", tensor=key
            )
    mains: dict[tuple[Numbers, Numbers], tuple[int, BoxLayout]] = {}
    for rank, box in boxes:
        if not box.main or not box.elements:
            continue
        part = (box.offset, box.sizes)
        if part not in mains:
            mains[part] = (rank, box)
        elif replicas:
            other, _ = mains[part]
            where = f"ranks {other} and {rank}" if other != rank else f"rank {rank}, twice"
            raise CheckpointingException(
                f"its box {box.words()} is a main replica on {where}: give all but one of them "
                "another replica_id",
                tensor=key,
            )
    stored = sum(box.elements for _, box in mains.values())
    if stored >= whole and first.grid is None:
        _check_disjoint(key, [*mains.values()])
    if stored == whole:
        return
    where = in_words({rank for rank, _ in mains.values()})
    what = "overlap or reach outside of it" if stored > whole else "leave a hole"
    lacking = ""
    if stored < whole:
        grid = None
        if first.grid is not None:
            cuts = zip(first.grid, first.sizes, strict=True)
            grid = [range(0, n * size, size or 1) for n, size in cuts]
        offsets = [(rank, box.offset) for rank, box in boxes if box.elements]
        lacking = _lacking("box", offsets, {offset for offset, _ in mains}, grid)
    raise CheckpointingException(
        f"its main replicas, on {where}, {what}: they have {stored} of its {whole} "
        f"elements{lacking}",
        tensor=key,
    )


def _lacking(
    what: str,
    offsets: list[tuple[int, Numbers]],
    mains: Container[Numbers],
    grid: Sequence[range] | None,
) -> str:
    """The first offset, of those that ranks have and of `grid`, at which none is the main replica:
    in words, with the ranks that have it; "" where none is known."""
    held: dict[Numbers, set[int]] = {}
    for rank, offset in offsets:
        if offset not in mains:
            held.setdefault(offset, set()).add(rank)
    if held:
        offset = min(held)
        have = "has" if len(held[offset]) == 1 else "have"
        return (
            f"; no rank is the main replica of its {what} at {list(offset)}, which "
            f"{in_words(held[offset])} {have}"
        )
    for offset in itertools.product(*grid) if grid is not None else ():
        if offset not in mains:
            return f"; no rank has its {what} at {list(offset)}"
    return ""


def in_words(ranks: Iterable[int]) -> str:
    """ "rank 3", or "ranks 0, 1, and 12 more"."""
    numbers = sorted(ranks)
    if not numbers:
        return "no rank"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed(map(str, numbers))}"


def listed(words: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    all_ = [*words]
    more = f", and {len(all_) - _SHOWN} more" if len(all_) > _SHOWN else ""
    return ", ".join(all_[:_SHOWN]) + more


def _check_disjoint(key: str, boxes: list[tuple[int, BoxLayout]]) -> None:
    offsets, sizes = [box.offset for _, box in boxes], [box.sizes for _, box in boxes]
    try:
        pair = core.call({"op": "find_overlap", "offsets": offsets, "sizes": sizes})
    except CheckpointError as error:  # they interlock in too many ways
        raise CheckpointingException(error.message, tensor=key) from error
    if pair is None:
        return
    (rank, box), (other_rank, other) = (boxes[place] for place in pair)
    raise CheckpointingException(
        f"its main replicas overlap: {box.words()} on rank {rank}, and "
        f"{other.words()} on rank {other_rank}",
        tensor=key,
    )


def _check_cells(
    key: str, cells: list[tuple[int, CellLayout]], whole: bool, replicas: bool
) -> None:
    first_rank, first = cells[0]
    mains: dict[Numbers, int] = {}
    for rank, cell in cells:
        if cell.shape != first.shape:
            raise CheckpointingException(
                f"ranks {first_rank} and {rank} disagree: a grid of {list(first.shape)} objects, "
                f"and one of {list(cell.shape)}",
                tensor=key,
            )
        if not cell.main:
            continue
        other = mains.get(cell.offset)
        if replicas and other is not None:
            where = f"ranks {other} and {rank}" if other != rank else f"rank {rank}, twice"
            raise CheckpointingException(
                f"its object at {list(cell.offset)} is a main replica on {where}", tensor=key
            )
        mains[cell.offset] = rank
    number = math.prod(first.shape)
    if whole and len(mains) != number and -1 not in first.shape:
        offsets = [(rank, cell.offset) for rank, cell in cells]
        raise CheckpointingException(
            f"{len(mains)} of its grid of {list(first.shape)} objects have a main replica, "
            f"{number} are due" + _lacking("object", offsets, mains, [*map(range, first.shape)]),
            tensor=key,
        )
