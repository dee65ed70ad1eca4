"""torch-ckpt ls: the leaves of a checkpoint, one a line."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Any

import click

from torch_ckpt import _core
from torch_ckpt.cli.output import Output, format_bytes, printable, with_output
from torch_ckpt.jobs import OpenedCheckpoint

_ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda leaf: natural(leaf["name"]),
    "size": lambda leaf: (-(leaf["bytes"] or 0), natural(leaf["name"])),
    "dtype": lambda leaf: (leaf["dtype"] or "", natural(leaf["name"])),
}


def natural(name: str) -> list[Any]:
    """A key by which layers.2 comes before layers.10."""
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


@click.command()
@click.argument("path", type=click.Path())
@click.argument("pattern", default="*")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="name",
    show_default=True,
    help="size: the largest first.",
)
@click.option("--format", help="What PATH is read as: torch_ckpt, hf, dcp, megatron or torch.")
@with_output
def ls(path: str, pattern: str, sort: str, format: str | None, output: Output) -> None:
    """List the leaves of the checkpoint PATH whose names match PATTERN.

    PATTERN is as in a shell, where * stands for dots too. Of tensors: dtype, shape, size.

    \b
    torch-ckpt ls checkpoint 'model.layers.*.weight' --sort size
    """
    opened = OpenedCheckpoint(path, format)
    leaves = sorted(_leaves(opened.describe(), pattern), key=_ORDERS[sort])
    output.report({"path": opened.path, "leaves": leaves}, lambda: _text(leaves))


def _leaves(described: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    """Tensors with a dtype, a shape and bytes; others with None in their places."""
    leaves = []
    columns = (described[column] for column in ("names", "kinds", "type_of"))
    for name, kind, at in zip(*columns, strict=True):
        if not fnmatch.fnmatchcase(name, pattern):
            continue
        is_tensor = kind != _core.OBJECT
        dtype, shape, size = described["types"][at] if is_tensor else (None, None, None)
        leaf = {"name": name, "dtype": dtype, "shape": shape, "bytes": size}
        leaves.append({**leaf, "alias_of": described["aliases"].get(name)})
    return leaves


def _text(leaves: list[dict[str, Any]]) -> str:
    rows = []
    for leaf in leaves:
        shape = "" if leaf["shape"] is None else str(leaf["shape"])
        size = "" if leaf["bytes"] is None else format_bytes(leaf["bytes"])
        if leaf["alias_of"] is not None:
            size = f"is {printable(leaf['alias_of'])}"
        rows.append((printable(leaf["name"]), leaf["dtype"] or "object", shape, size))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    a, b, c, d = widths
    lines = (f"{row[0]:{a}}  {row[1]:{b}}  {row[2]:{c}}  {row[3]:>{d}}" for row in rows)
    return "\n".join(line.rstrip() for line in lines)
