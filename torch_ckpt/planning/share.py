"""Who writes which of the boxes that several ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_ckpt.native import core


class SharedBox(NamedTuple):
    """holders: the ranks that could write it. near: its tensor's boxes are to stay on few nodes."""

    holders: tuple[int, ...]
    tensor: str
    bytes: int
    near: bool = False


def share_boxes(nodes: Sequence[int], boxes: Iterable[SharedBox]) -> list[int]:
    """The rank that writes each of `boxes`: of its holders one that has little to write
    (csrc/plan/share.h). nodes: the node of each rank."""
    sets: dict[tuple[int, ...], int] = {}
    tensors: dict[str, int] = {}
    columns: dict[str, list[int]] = {"holders": [], "tensors": [], "near": [], "bytes": []}
    for box in boxes:
        columns["holders"].append(sets.setdefault(box.holders, len(sets)))
        columns["tensors"].append(tensors.setdefault(box.tensor, len(tensors)))
        columns["near"].append(int(box.near))
        columns["bytes"].append(box.bytes)
    answer = core.call({"op": "share", "nodes": list(nodes), "sets": list(sets), **columns})
    ranks: list[int] = answer["ranks"]
    return ranks
