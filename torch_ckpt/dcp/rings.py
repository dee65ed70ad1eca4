"""Rings: ranks of one node that write short rows of tensors together (csrc/engine/ring_link.h)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

# Bytes in a row, in the file, below which a rank does not write a box by itself: the blocks that it
# shares with other ranks, one at each end of a row, must be few beside the row.
MIN_ROW_BYTES = 64 * 1024


class Node(NamedTuple):
    """What processes have in common that can hand each other memory: they find each other by names
    of one kernel, network namespace and user."""

    boot_id: str
    network: str
    user: int


def this_node() -> Node | None:
    """None where the system does not say."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Node(boot_id, os.readlink("/proc/self/ns/net"), os.geteuid())
    except OSError:
        return None


def node_numbers(plans: Sequence[SavePlan]) -> list[int]:
    """A number for each rank's node, which its plan says. Ranks that do not say are alone on it."""
    first: dict[Node, int] = {}
    nodes = (plan.storage_data for plan in plans)
    return [
        first.setdefault(node, rank) if isinstance(node, Node) else rank
        for rank, node in enumerate(nodes)
    ]


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
_Spans = dict[int, tuple[int, int]]  # by node: the rows in which it has boxes


def plan_rings(
    plans: Sequence[SavePlan], tensors: Mapping[str, TensorWriteData]
) -> tuple[list[list[int]], dict[str, list[Band]]]:
    """The rings, each a leader and its senders, and the bands of those of `tensors` (all that are
    planned, each with the description of any box) that their ranks do not write by themselves.

    A tensor has a band for each node that has a box of it, if these are in rows that no other node
    has any of; else the coordinator gathers it. Of boxes that are one row each, which ranks can
    write by themselves, a ring takes those that it makes longer rows of.
    """
    shorts = _short_tensors(plans)
    _drop_small_stretches(tensors, shorts)
    if not shorts:
        return [], {}
    nodes = node_numbers(plans)
    spans: dict[str, _Spans] = {fqn: {} for fqn in shorts}
    for rank, fqn, data in _boxes(plans, shorts):
        begin = data.chunk.offsets[0]
        end = begin + data.chunk.sizes[0]
        known = spans[fqn].get(nodes[rank], (begin, end))
        spans[fqn][nodes[rank]] = (min(begin, known[0]), max(end, known[1]))
    for fqn, of_nodes in spans.items():
        one_row = tensors[fqn] if shorts[fqn] == 1 else None
        spans[fqn] = {
            node: span
            for node, span in _apart(of_nodes).items()
            if one_row is None or _is_long(span, one_row)
        }
    members: dict[int, set[int]] = {}
    for rank, fqn, _ in _boxes(plans, shorts):
        if nodes[rank] in spans[fqn]:
            members.setdefault(nodes[rank], set()).add(rank)
    # One rank alone has nobody to hand anything to.
    rings = {node: sorted(ranks) for node, ranks in members.items() if len(ranks) > 1}
    numbers = {node: number for number, node in enumerate(rings)}
    bands: dict[str, list[Band]] = {}
    for fqn, of_nodes in spans.items():
        bands[fqn] = [(numbers.get(node, -1), *span) for node, span in of_nodes.items()]
        if shorts[fqn] == 1:
            bands[fqn] = [band for band in bands[fqn] if band[0] >= 0]
        elif not of_nodes:
            bands[fqn] = [(-1, 0, tensors[fqn].size[0])]
    return list(rings.values()), bands


def _short_tensors(plans: Sequence[SavePlan]) -> dict[str, int]:
    """Tensors with boxes in short rows, and how many these are in a box at most."""
    shorts: dict[str, int] = {}
    known: dict[int, int] = {}  # by description: boxes that are alike share one
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            rows = known.get(id(data))
            if rows is None:
                rows = known[id(data)] = 0 if 0 in data.chunk.sizes else short_rows(data)
            if rows > shorts.get(item.index.fqn, 0):
                shorts[item.index.fqn] = rows
    return shorts


def _drop_small_stretches(tensors: Mapping[str, TensorWriteData], shorts: dict[str, int]) -> None:
    """Take from `shorts` the boxes of one row that a ring could not make longer: those of tensors
    with too few bytes, together with their neighbours in the state dict (which are about those in
    the file)."""
    for is_short, names in itertools.groupby(tensors, shorts.__contains__):
        stretch = list(names) if is_short else []
        if sum(_bytes(tensors[fqn]) for fqn in stretch) >= MIN_ROW_BYTES:
            continue
        for fqn in stretch:
            if shorts[fqn] == 1:
                del shorts[fqn]


def _bytes(data: TensorWriteData) -> int:
    return math.prod(data.size) * data.properties.dtype.itemsize


def _is_long(span: tuple[int, int], data: TensorWriteData) -> bool:
    """Whether these rows are worth a ring: all of a tensor (with its neighbours) or many bytes."""
    rows = span[1] - span[0]
    return rows == data.size[0] or rows * (_bytes(data) // data.size[0]) >= MIN_ROW_BYTES


def _boxes(
    plans: Sequence[SavePlan], shorts: Mapping[str, int]
) -> Iterator[tuple[int, str, TensorWriteData]]:
    """Rank, tensor and description of the boxes of `shorts` that have bytes."""
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is not None and item.index.fqn in shorts and 0 not in data.chunk.sizes:
                yield rank, item.index.fqn, data


def _apart(spans: _Spans) -> _Spans:
    """`spans` in their order; none if two have a row in common."""
    ordered = dict(sorted(spans.items(), key=lambda item: item[1]))
    at = 0
    for begin, end in ordered.values():
        if begin < at:
            return {}
        at = end
    return ordered


def refuse_ring(staging: str, rank: int) -> None:
    """Leave word in staging that this rank does not come."""
    Path(staging, f"ring_refused.{rank}").touch()
