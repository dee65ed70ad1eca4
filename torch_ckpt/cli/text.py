"""Text that is made to be read: columns, natural order of names, trees, colour.

Colour is ANSI codes; Output.report takes them out where nobody would see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

_GAP = "  "
_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> list[Any]:
    """A key by which layers.2 comes before layers.10."""
    return [
        # Not as an int, which takes no more than some thousand digits.
        (1, len(digits := part.lstrip("0")), digits) if part.isdecimal() else (0, 0, part)
        for part in _DIGITS.split(name)
        if part
    ]


def columns(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    styles: Mapping[int, Callable[[str], str]] = MappingProxyType({}),
) -> list[str]:
    """The rows as lines, their cells one below the other: those of the columns `right` with their
    ends, others with their beginnings. `styles`: what colours the cells of a column. The last cell
    of a row that says something may be wider than its column."""
    ends = [max((at for at, cell in enumerate(row) if cell), default=0) for row in rows]
    widths = [0] * max((len(row) for row in rows), default=0)
    for row, end in zip(rows, ends, strict=True):
        for at, cell in enumerate(row[: end + 1]):
            if at < end or at in right or at == 0:
                widths[at] = max(widths[at], len(cell))
    lines = []
    for row, end in zip(rows, ends, strict=True):
        cells = []
        for at, (cell, width) in enumerate(zip(row[: end + 1], widths, strict=False)):
            if not width and not cell:
                continue
            padding = " " * (width - len(cell))
            shown = styles[at](cell) if at in styles and cell else cell
            cells.append(padding + shown if at in right else shown + padding)
        lines.append(_GAP.join(cells).rstrip())
    return lines


def bold(text: str) -> str:
    """`text`, where colour is seen, as what is looked for."""
    return click.style(text, bold=True)


def dim(text: str) -> str:
    """`text`, where colour is seen, as what matters less."""
    return click.style(text, dim=True)


def red(text: str) -> str:
    """`text`, where colour is seen, as what is wrong."""
    return click.style(text, fg="red")
