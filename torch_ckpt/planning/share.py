"""Who writes what of the boxes that several ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torch_ckpt.native import core


class SharedBox(NamedTuple):
    """holders: the ranks that could write it. rows: how often it may be cut along its outermost
    axis, each of `row_bytes`; 1 keeps it whole. near: its tensor's boxes are to stay on few nodes.
    """

    holders: tuple[int, ...]
    tensor: str
    rows: int
    row_bytes: int
    near: bool = False

    @staticmethod
    def of(
        holders: tuple[int, ...],
        tensor: str,
        sizes: Sequence[int],
        dtype: torch.dtype,
        near: bool = False,
    ) -> SharedBox:
        """A box of `sizes`, which is cut where that balances what ranks write; one whose tensor's
        boxes are to stay near is not."""
        bytes_ = math.prod(sizes) * dtype.itemsize
        rows = max(1, sizes[outermost(sizes)]) if sizes and not near else 1
        return SharedBox(holders, tensor, rows, bytes_ // rows, near)


class BoxShare(NamedTuple):
    """The rows from `begin` to `end` of a box, which `rank` writes."""

    rank: int
    begin: int
    end: int


def share_boxes(nodes: Sequence[int], boxes: Iterable[SharedBox]) -> list[list[BoxShare]]:
    """Who writes each of `boxes`, in whole or in shares: holders that have little to write
    (csrc/plan/share.h). nodes: the node of each rank."""
    sets: dict[tuple[int, ...], int] = {}
    tensors: dict[str, int] = {}
    names = ("holders", "tensors", "near", "rows", "row_bytes")
    columns: dict[str, list[int]] = {name: [] for name in names}
    for box in boxes:
        columns["holders"].append(sets.setdefault(box.holders, len(sets)))
        columns["tensors"].append(tensors.setdefault(box.tensor, len(tensors)))
        columns["near"].append(int(box.near))
        columns["rows"].append(box.rows)
        columns["row_bytes"].append(box.row_bytes)
    answer = core.call({"op": "share", "nodes": list(nodes), "sets": list(sets), **columns})
    shares: list[list[BoxShare]] = [[] for _ in columns["holders"]]
    found = (answer[name] for name in ("boxes", "ranks", "begins", "ends"))
    for number, rank, begin, end in zip(*found, strict=True):
        shares[number].append(BoxShare(rank, begin, end))
    return shares


def outermost(sizes: Sequence[int]) -> int:
    """The axis along which a box of `sizes` is cut into shares that each are in a row in its
    memory, as rows are: the first that has several."""
    return next((axis for axis, size in enumerate(sizes) if size > 1), 0)
