"""Names of leaves as a tree, with counts and sizes for each node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_ckpt.cli.leaves import cells_of
from torch_ckpt.cli.output import count, format_bytes, printable
from torch_ckpt.cli.text import bold, columns, natural

_INDENT = "  "
_MOST_LEVELS = 100  # what is deeper is one name, with its dots
_MOST_DIGITS = 19  # of a number that may have neighbours
_Row = tuple[str, str, str, str]


class _Node:
    """What is below one name: a leaf of that name, and nodes by what comes next."""

    def __init__(self) -> None:
        self.leaf: dict[str, Any] | None = None
        self.below: dict[str, _Node] = {}
        self.tensors = self.others = self.bytes = 0
        self.kind = 0  # equal of nodes that would be shown alike

    def add(self, leaf: dict[str, Any]) -> None:
        is_tensor = leaf["dtype"] is not None
        self.tensors += is_tensor
        self.others += not is_tensor
        if is_tensor and leaf["alias_of"] is None:
            self.bytes += leaf["bytes"]


def tree_lines(leaves: list[dict[str, Any]], depth: int | None) -> list[str]:
    """The `leaves` of `with_values`, their names cut at dots. Neighbours that are numbered and
    alike, as the layers of a model, are shown once. `depth`: levels that are shown; None: all."""
    root = _Node()
    for leaf in leaves:
        node = root
        node.add(leaf)
        for part in leaf["name"].split(".", _MOST_LEVELS):
            node = node.below.setdefault(part, _Node())
            node.add(leaf)
        node.leaf = leaf
    _set_kinds(root, {})
    return columns(list(_rows_below(root, 0, depth)), right={3}, styles={0: bold})


def _set_kinds(node: _Node, kinds: dict[Any, int]) -> None:
    for each in node.below.values():
        _set_kinds(each, kinds)
    leaf = node.leaf
    own = None if leaf is None else (leaf["dtype"], str(leaf["shape"]), leaf["value"])
    # An alias is like no other: it says of what.
    tied = None if leaf is None else leaf["alias_of"]
    key = (own, tied, tuple((name, each.kind) for name, each in node.below.items()))
    node.kind = kinds.setdefault(key, len(kinds))


def _rows_below(node: _Node, level: int, depth: int | None) -> Iterator[_Row]:
    if depth is not None and level >= depth:
        return
    for run in _runs(node):
        label = printable(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}")
        first = node.below[run[0]]
        # A name that leads to one other name alone is no level of its own.
        while first.leaf is None and len(first.below) == 1:
            ((name, first),) = first.below.items()
            label += f".{printable(name)}"
        indented = _INDENT * level + label
        times = f"{len(run)} x " if len(run) > 1 else ""
        if first.leaf is not None and not first.below:
            _, dtype, what, size = cells_of(first.leaf)
            if times and first.tensors:
                size = format_bytes(len(run) * first.bytes)
            yield indented, dtype, times + what, size
            continue
        counts = [count(first.tensors, "tensor")] if first.tensors else []
        counts += [count(first.others, "other leaf", "other leaves")] if first.others else []
        size = format_bytes(len(run) * first.bytes) if first.tensors else ""
        yield indented, "", times + ", ".join(counts), size
        if first.leaf is not None:
            yield (_INDENT * (level + 1) + "(itself)", *cells_of(first.leaf)[1:])
        yield from _rows_below(first, level + 1, depth)


def _runs(node: _Node) -> Iterator[list[str]]:
    """The names below in natural order; those that are consecutive numbers of one kind together."""
    run: list[str] = []
    for name in sorted(node.below, key=natural):
        if run and _follows(run[-1], name) and node.below[run[-1]].kind == node.below[name].kind:
            run.append(name)
            continue
        if run:
            yield run
        run = [name]
    if run:
        yield run


def _follows(name: str, other: str) -> bool:
    digits = name.isascii() and name.isdigit() and len(name) < _MOST_DIGITS
    return digits and other == str(int(name) + 1)
