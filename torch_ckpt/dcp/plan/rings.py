"""Rings: ranks of one node that write short rows together (csrc/engine/save/ring_link.h)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

from torch_ckpt.dcp.node import Node, numbers_of

# Bytes in a row, in the file, below which a rank does not write a box by itself: the blocks that it
# shares with other ranks, one at each end of a row, must be few beside the row.
MIN_ROW_BYTES = 64 * 1024


class RankNote(NamedTuple):
    """What a rank's plan for final files tells the coordinator beside its items, as
    `storage_data`: where the rank runs, and the names that its state dict has, in order. Of the
    items themselves other ranks' are taken out."""

    node: Node | None
    fqns: Sequence[str] = ()


def note_of(plan: SavePlan) -> RankNote:
    note = plan.storage_data
    return note if isinstance(note, RankNote) else RankNote(None)


def node_numbers(plans: Sequence[SavePlan]) -> list[int]:
    """A number for each rank's node, which its plan says."""
    return numbers_of([note_of(plan).node for plan in plans])


def short_rows(data: TensorWriteData) -> int:
    """In how many rows the box lies in its tensor, if these are too short to be written one by
    one; else 0."""
    row = data.properties.dtype.itemsize
    sizes = data.chunk.sizes
    for dim in reversed(range(len(sizes))):
        row *= sizes[dim]
        if sizes[dim] != data.size[dim]:
            return math.prod(sizes[:dim]) if row < MIN_ROW_BYTES else 0
    return 0


# The number of a ring, or -1 for the coordinator, and the rows of a tensor (of its first dimension)
# that it writes.
Band = tuple[int, int, int]
Boxes = list[tuple[int, TensorWriteData]]  # of a tensor: who has one, and its description


class _Kind:
    """What is so of all tensors that have the same boxes."""

    def __init__(self, boxes: Boxes, nodes: Sequence[int]) -> None:
        boxes = [(rank, data) for rank, data in boxes if 0 not in data.chunk.sizes]
        # The rows of a box, if they are short: 0 for tensors that their ranks write, of which
        # nothing else is said.
        self.rows = max((short_rows(data) for _, data in boxes), default=0)
        self.size = self.bytes = 0  # rows and bytes of the tensor
        self.ranks: dict[int, set[int]] = {}  # by node
        self.spans: dict[int, tuple[int, int]] = {}  # by node, where they are apart: its rows
        if self.rows == 0:
            return
        data = boxes[0][1]
        self.size = data.size[0]
        self.bytes = math.prod(data.size) * data.properties.dtype.itemsize
        spans: dict[int, tuple[int, int]] = {}
        for rank, data in boxes:
            begin = data.chunk.offsets[0]
            end = begin + data.chunk.sizes[0]
            known = spans.get(nodes[rank], (begin, end))
            spans[nodes[rank]] = (min(begin, known[0]), max(end, known[1]))
            self.ranks.setdefault(nodes[rank], set()).add(rank)
        ordered = sorted(spans.items(), key=lambda item: item[1])
        if all(left[1] <= right[0] for (_, left), (_, right) in itertools.pairwise(ordered)):
            self.spans = {node: span for node, span in ordered if self._is_worth_it(span)}

    def _is_worth_it(self, span: tuple[int, int]) -> bool:
        """Boxes of one row ranks can write by themselves. A ring takes those of all of a tensor,
        which may have neighbours, or of many bytes."""
        rows = span[1] - span[0]
        longer = rows == self.size or rows * (self.bytes // self.size) >= MIN_ROW_BYTES
        return self.rows > 1 or longer

    def bands(self, rings: Mapping[int, int]) -> list[Band]:
        """Given the numbers of the nodes' rings."""
        if self.rows == 1:
            return [(rings[node], *span) for node, span in self.spans.items() if node in rings]
        if not self.spans:
            return [(-1, 0, self.size)]
        return [(rings.get(node, -1), *span) for node, span in self.spans.items()]


def plan_rings(
    tensors: Mapping[str, Boxes], nodes: Sequence[int]
) -> tuple[list[list[int]], dict[str, list[Band]]]:
    """The rings, each a leader and its senders, and the bands of those of `tensors` (all that are
    planned) that their ranks do not write by themselves, given the number of each rank's node.
    Tensors of the same boxes have the same list of bands.

    A tensor has a band for each node that has a box of it, if these are in rows that no other node
    has any of; else the coordinator gathers it. Of boxes that are one row each, which ranks can
    write by themselves, a ring takes those that it makes longer rows of.
    """
    kinds: dict[tuple[Any, ...], _Kind] = {}
    kind_of: dict[str, _Kind] = {}
    whole = _Kind([], nodes)
    for fqn, boxes in tensors.items():
        data = boxes[0][1]
        if data.chunk.sizes == data.size:
            kind_of[fqn] = whole
            continue
        key = tuple([(rank, id(data)) for rank, data in boxes])
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _Kind(boxes, nodes)
        kind_of[fqn] = kind
    gathered = _gathered(kind_of)
    gathered_kinds = {id(kind): kind for kind in gathered.values()}
    members: dict[int, set[int]] = {}
    for kind in gathered_kinds.values():
        for node in kind.spans:
            members.setdefault(node, set()).update(kind.ranks[node])
    # One rank alone has nobody to hand anything to.
    rings = {node: sorted(ranks) for node, ranks in sorted(members.items()) if len(ranks) > 1}
    numbers = {node: number for number, node in enumerate(rings)}
    bands = {number: kind.bands(numbers) for number, kind in gathered_kinds.items()}
    return list(rings.values()), {fqn: bands[id(kind)] for fqn, kind in gathered.items()}


def _gathered(kinds: Mapping[str, _Kind]) -> dict[str, _Kind]:
    """Those in short rows, but for boxes of one row that no ring could make longer: of tensors with
    too few bytes, together with their neighbours in the state dict (which are about those in the
    file)."""
    found: dict[str, _Kind] = {}
    for is_short, items in itertools.groupby(kinds.items(), lambda item: item[1].rows > 0):
        stretch = list(items) if is_short else []
        small = sum(kind.bytes for _, kind in stretch) < MIN_ROW_BYTES
        found.update({fqn: kind for fqn, kind in stretch if kind.rows > 1 or not small})
    return found
