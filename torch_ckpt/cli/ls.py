"""torch-ckpt ls: the leaves of a checkpoint, one a line."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import click

from torch_ckpt.cli.leaves import cells_of, leaves_of, with_values
from torch_ckpt.cli.output import Output, with_output
from torch_ckpt.cli.text import bold, columns
from torch_ckpt.native.opened import OpenedCheckpoint

# Of leaves that are in natural order, as sorting keeps it.
_ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda leaf: 0,
    "size": lambda leaf: -(leaf["bytes"] or 0),
    "dtype": lambda leaf: leaf["dtype"] or "",
}


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
    """List the leaves of a checkpoint by their names.

    PATTERN is as in a shell, where * stands for dots too. Of tensors: dtype, shape, size; of other
    leaves: the value, unless it stands in a file of more than 16 MiB.

    \b
    torch-ckpt ls checkpoint
    torch-ckpt ls checkpoint 'model.layers.*.weight' --sort size
    """
    opened = OpenedCheckpoint(path, format)
    listing = opened.listing()
    leaves = leaves_of(listing, lambda name: fnmatch.fnmatchcase(name, pattern))
    leaves = with_values(opened, listing, sorted(leaves, key=_ORDERS[sort]))
    output.report(
        {"path": opened.path, "leaves": leaves},
        lambda: "\n".join(
            columns([cells_of(leaf) for leaf in leaves], right={3}, styles={0: bold})
        ),
    )
