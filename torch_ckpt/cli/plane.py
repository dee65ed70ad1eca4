"""The boxes of a tensor in a plane, as `torch-ckpt layout` draws them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_ckpt.checkpoint.description import TensorInfo, Topology

Interval = tuple[int, int]  # from, and to but not with


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor and who wrote it: a rank, or a file where its name says no rank."""

    owner: int | str
    file: str
    at: int  # in the file
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int

    def interval(self, dimension: int) -> Interval:
        begin = self.offsets[dimension]
        return begin, begin + self.sizes[dimension]


def boxes_of(tensor: TensorInfo, topology: Topology) -> list[Box]:
    """By rank, or by file, and then as they lie in the tensor."""
    elements = math.prod(tensor.shape)
    boxes = [
        Box(
            topology.ranks.get(each.file, each.file),
            each.file,
            each.offset,
            each.offsets,
            each.sizes,
            tensor.bytes * math.prod(each.sizes) // elements if elements else 0,
        )
        for each in tensor.placements
    ]
    return sorted(boxes, key=lambda box: (_order(box.owner), box.offsets))


def _order(owner: int | str) -> tuple[bool, int, str]:
    return (False, owner, "") if isinstance(owner, int) else (True, 0, owner)


def owners_of(boxes: Sequence[Box]) -> list[int | str]:
    return list(dict.fromkeys(box.owner for box in boxes))


def name_of(owner: int | str) -> str:
    return f"rank {owner}" if isinstance(owner, int) else owner


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a slice shows of a box, in elements."""

    box: Box
    rows: Interval
    columns: Interval


@dataclass(frozen=True, slots=True)
class Slice:
    """Rectangles that tile the plane: of the boxes that reach through `fixed`, intervals of other
    dimensions in which the boxes are the same."""

    fixed: dict[int, Interval]
    rectangles: list[Rectangle]

    def label(self) -> str:
        """ "where dimension 2 is 0 to 4"; empty where the plane is all there is."""
        parts = [
            f"dimension {dimension} is {begin:,} to {end:,}"
            for dimension, (begin, end) in self.fixed.items()
        ]
        return f"where {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True)
class Plane:
    """The two dimensions that are drawn, and slices of the other ones that are sharded.

    rows, columns: the dimensions; None where the tensor has fewer. height, width: elements in them.
    whole: dimensions that every box has whole, and that are not drawn.
    count: how many slices there are.
    """

    rows: int | None
    columns: int | None
    height: int
    width: int
    whole: tuple[int, ...]
    count: int
    boxes: Sequence[Box]
    cuts: dict[int, list[Interval]]

    def slices(self) -> Iterator[Slice]:
        for choice in itertools.product(*self.cuts.values()):
            fixed = dict(zip(self.cuts, choice, strict=True))
            yield Slice(
                fixed,
                [
                    Rectangle(box, self._side(box, self.rows), self._side(box, self.columns))
                    for box in self.boxes
                    if all(_holds(box.interval(each), fixed[each]) for each in fixed)
                ],
            )

    @staticmethod
    def _side(box: Box, dimension: int | None) -> Interval:
        return (0, 1) if dimension is None else box.interval(dimension)

    def note(self) -> str:
        """What of the tensor is not in the plane; empty where that is nothing."""
        said = []
        if self.whole:
            dimensions = "dimension" if len(self.whole) == 1 else "dimensions"
            said.append(f"every box has all of {dimensions} {', '.join(map(str, self.whole))}")
        if self.cuts:
            dimensions = "dimension" if len(self.cuts) == 1 else "dimensions"
            said.append(f"{self.count:,} slices of {dimensions} {', '.join(map(str, self.cuts))}")
        return "; ".join(said)


def _holds(outer: Interval, inner: Interval) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def plane_of(shape: Sequence[int], boxes: Sequence[Box]) -> Plane:
    """In the first two dimensions that are sharded; or else in the first ones that there are."""
    sharded = [
        at for at, size in enumerate(shape) if any(box.interval(at) != (0, size) for box in boxes)
    ]
    drawn = sorted([*sharded, *(at for at in range(len(shape)) if at not in sharded)][:2])
    columns = drawn[-1] if drawn else None
    rows = drawn[0] if len(drawn) == 2 else None
    cuts = {at: _cuts(boxes, at) for at in sharded if at not in drawn}
    return Plane(
        rows,
        columns,
        1 if rows is None else shape[rows],
        1 if columns is None else shape[columns],
        tuple(at for at in range(len(shape)) if at not in drawn and at not in cuts),
        math.prod(len(each) for each in cuts.values()),
        boxes,
        cuts,
    )


def _cuts(boxes: Sequence[Box], dimension: int) -> list[Interval]:
    borders = sorted({border for box in boxes for border in box.interval(dimension)})
    return list(itertools.pairwise(borders))
