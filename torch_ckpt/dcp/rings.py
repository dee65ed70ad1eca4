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


def rings_of(
    ranks: Mapping[str, set[int]], nodes: Sequence[object]
) -> tuple[list[list[int]], dict[str, int]]:
    """Rings for tensors, given the ranks that have a part of each, and each rank's Node: a leader
    and its senders; and the number of the ring of each tensor that is all on one node."""
    members: dict[Node, set[int]] = {}
    node_of: dict[str, Node] = {}
    for fqn, having in ranks.items():
        places = {nodes[rank] for rank in having}
        node = places.pop() if len(places) == 1 else None
        if isinstance(node, Node):
            node_of[fqn] = node
            members.setdefault(node, set()).update(having)
    # One rank alone has nobody to hand anything to.
    rings = {node: sorted(of_node) for node, of_node in members.items() if len(of_node) > 1}
    numbers = {node: number for number, node in enumerate(rings)}
    return list(rings.values()), {
        fqn: numbers[node] for fqn, node in node_of.items() if node in numbers
    }


def refuse_ring(staging: str, rank: int) -> None:
    """Leave word in staging that this rank does not come."""
    Path(staging, f"ring_refused.{rank}").touch()
