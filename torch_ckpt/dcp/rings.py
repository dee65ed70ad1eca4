"""Rings: ranks of one node that write gathered tensors together (csrc/engine/ring_link.h)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


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


class Rows(NamedTuple):
    """Rows of a tensor, along its first dimension, that `rank` has a box in."""

    rank: int
    begin: int
    end: int


# The number of a ring, or -1 where there is none, and the rows that it writes.
Band = tuple[int, int, int]


def rings_of(
    parts: Mapping[str, Sequence[Rows]], nodes: Sequence[object]
) -> tuple[list[list[int]], dict[str, list[Band]]]:
    """Rings for tensors, given the parts of each, and each rank's Node: a leader and its senders.
    And the bands of each tensor: what a node has of it, if that are rows that no other has any of,
    in order; else all of it. (Whether a node's boxes fill the rows is for its ranks to find out.)
    """
    spans = {fqn: _spans(rows, nodes) for fqn, rows in parts.items()}
    members: dict[Node, set[int]] = {}
    for fqn, of_nodes in spans.items():
        for rows in parts[fqn]:
            node = nodes[rows.rank]
            if isinstance(node, Node) and node in of_nodes:
                members.setdefault(node, set()).add(rows.rank)
    # One rank alone has nobody to hand anything to.
    rings = {node: sorted(of_node) for node, of_node in members.items() if len(of_node) > 1}
    numbers: dict[object, int] = {node: number for number, node in enumerate(rings)}
    bands = {
        fqn: [(numbers.get(node, -1), begin, end) for node, (begin, end) in of_nodes.items()]
        for fqn, of_nodes in spans.items()
    }
    return list(rings.values()), bands


def _spans(parts: Sequence[Rows], nodes: Sequence[object]) -> dict[object, tuple[int, int]]:
    spans: dict[object, tuple[int, int]] = {}
    for rank, begin, end in parts:
        # Ranks that do not say where they are are on nodes of their own.
        node = nodes[rank] if isinstance(nodes[rank], Node) else rank
        known = spans.get(node, (begin, end))
        spans[node] = (min(begin, known[0]), max(end, known[1]))
    ordered = sorted(spans.items(), key=lambda span: span[1])
    at = 0
    for _, (begin, end) in ordered:
        if begin < at:
            return {None: (0, max(end for _, end in spans.values()))}
        at = end
    return dict(ordered)


def refuse_ring(staging: str, rank: int) -> None:
    """Leave word in staging that this rank does not come."""
    Path(staging, f"ring_refused.{rank}").touch()
