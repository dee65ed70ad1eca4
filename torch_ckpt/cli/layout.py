"""torch-ckpt layout: which rank wrote which box of a tensor."""

from __future__ import annotations

import difflib
import itertools
from typing import Any

import click

from torch_ckpt.checkpoint.description import Placement, TensorInfo, topology_of
from torch_ckpt.cli.layout_svg import svg
from torch_ckpt.cli.output import Output, count, format_bytes, printable, with_output
from torch_ckpt.cli.picture import check_picture_name, write_picture
from torch_ckpt.cli.plane import Box, Plane, Slice, boxes_of, owners_of, plane_of
from torch_ckpt.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from torch_ckpt.native import core
from torch_ckpt.native.opened import OpenedCheckpoint

_WIDTH, _HEIGHT = 64, 16  # characters of a map, at the most
_SLICES = 8  # that are drawn, at the most
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SEVERAL = "*"
_COLOURS = ("blue", "yellow", "green", "red", "cyan", "magenta")  # on a terminal


@click.command()
@click.argument("path", type=click.Path())
@click.argument("fqn")
@click.option("--svg", "picture", type=click.Path(), metavar="FILE.svg", help="Draw it too.")
@click.option("--format", help="What PATH is read as: torch_ckpt, hf, dcp, megatron or torch.")
@with_output
def layout(path: str, fqn: str, picture: str | None, format: str | None, output: Output) -> None:
    """Show which rank wrote what of a tensor.

    These are the boxes of the tensor FQN in the checkpoint PATH. Replicas, which one rank writes
    for all, are of that rank. Final files do not say which ranks wrote them: there files stand for
    ranks. Two dimensions are drawn, the first that are sharded, in slices of further ones that are.

    \b
    torch-ckpt layout checkpoint model.layers.0.weight
    torch-ckpt layout checkpoint model.layers.0.weight --svg weight.svg
    """
    if picture is not None:
        check_picture_name(picture, ".svg")
    opened = OpenedCheckpoint(path, format)
    tensor = _find(opened, fqn)
    boxes = boxes_of(tensor, topology_of(None, (each.file for each in tensor.placements)))
    plane = plane_of(tensor.shape, boxes)
    slices = list(itertools.islice(plane.slices(), _SLICES))
    if picture is not None:
        write_picture(picture, svg(_title(tensor, boxes), plane, slices, boxes).encode())
    output.report(
        _fields(tensor, boxes, opened.path, picture), lambda: _text(tensor, boxes, plane, slices)
    )


def _find(opened: OpenedCheckpoint, fqn: str) -> TensorInfo:
    """The boxes of this tensor alone: a checkpoint may have thousands of others."""
    listing = opened.listing()
    names = listing.names
    if fqn not in names:
        near = difflib.get_close_matches(fqn, names, 3)
        said = f"; near: {', '.join(map(repr, near))}" if near else ""
        raise IncompleteError(f"is not in the checkpoint{said}", file=opened.path, tensor=fqn)
    at = names.index(fqn)
    if listing.kinds[at] == core.OBJECT:
        text = "is no tensor and has no boxes; 'torch-ckpt show' shows it"
        raise InvalidArgumentError(text, file=opened.path, tensor=fqn)
    if fqn in listing.unread:
        text = f"{listing.unread[fqn]}, and is not read"
        raise UnsupportedError(text, file=opened.path, tensor=fqn)
    dtype, shape, size = listing.types[listing.type_of[at]]
    answer = core.call(
        {"op": "placements", "checkpoint": opened.id, "name": fqn, "described": True}
    )
    placements = tuple(
        Placement(box["file"], box["offset"], tuple(box["offsets"]), tuple(box["sizes"]))
        for box in answer["placements"]
    )
    alias_of = listing.aliases.get(fqn)
    return TensorInfo(fqn, dtype, tuple(shape or ()), size, (fqn,), placements, alias_of)


def _title(tensor: TensorInfo, boxes: list[Box]) -> str:
    """ "w  F32[60, 50]  11.7 KiB, 2 boxes of 2 ranks"."""
    owners = owners_of(boxes)
    noun = "rank" if all(isinstance(owner, int) for owner in owners) else "file"
    held = f"{count(len(boxes), 'box', 'boxes')} in {count(len(owners), noun)}"
    if noun == "rank":
        held = held.replace(" in ", " of ")
    of = f"{printable(tensor.name)}  {tensor.dtype}{list(tensor.shape)}"
    return f"{of}  {format_bytes(tensor.bytes)}, {held}"


def _fields(tensor: TensorInfo, boxes: list[Box], path: str, picture: str | None) -> dict[str, Any]:
    return {
        "path": path,
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.bytes,
        "alias_of": tensor.alias_of,
        "boxes": [
            {
                "rank": box.owner if isinstance(box.owner, int) else None,
                "file": box.file,
                "at": box.at,
                "offsets": list(box.offsets),
                "sizes": list(box.sizes),
                "bytes": box.bytes,
            }
            for box in boxes
        ],
        "svg": picture,
    }


def _text(tensor: TensorInfo, boxes: list[Box], plane: Plane, slices: list[Slice]) -> str:
    owners = owners_of(boxes)
    symbols = {owner: _SYMBOLS[at % len(_SYMBOLS)] for at, owner in enumerate(owners)}
    for owner in owners:
        if isinstance(owner, int):
            symbols[owner] = _SYMBOLS[owner % len(_SYMBOLS)]
    lines = [_title(tensor, boxes)]
    if tensor.alias_of is not None:
        lines.append(f"  stored as {printable(tensor.alias_of)}")
    lines += ["", *_table(boxes, symbols)]
    if len(owners) > 1:
        lines += ["", *_maps(plane, slices, symbols)]
    return "\n".join(lines)


def _table(boxes: list[Box], symbols: dict[int | str, str]) -> list[str]:
    rows: list[tuple[str, ...]] = [("map", "rank", "offsets", "sizes", "file", "at byte", "size")]
    for box in boxes:
        rank = str(box.owner) if isinstance(box.owner, int) else "-"
        sides = str(list(box.offsets)), str(list(box.sizes))
        where = printable(box.file), f"{box.at:,}", format_bytes(box.bytes)
        rows.append((symbols[box.owner], rank, *sides, *where))
    alignments = "<><<<>>"
    if len(symbols) == 1:  # of which no map is drawn
        rows, alignments = [row[1:] for row in rows], alignments[1:]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{align}{width}}"
            for cell, align, width in zip(row, alignments, widths, strict=True)
        )
        for row in rows
    ]


def _maps(plane: Plane, slices: list[Slice], symbols: dict[int | str, str]) -> list[str]:
    lines = [plane.note()] if plane.note() else []
    if len(slices) < plane.count:
        lines.append(f"the first {len(slices)} of them:")
    columns, rows = min(plane.width, _WIDTH), min(plane.height, _HEIGHT)
    margin = len(f"{plane.height:,}") if plane.rows is not None else 0
    if plane.columns is not None:
        across = f"dimension {plane.columns}"
        down = "" if plane.rows is None else f", dimension {plane.rows} downwards"
        lines.append(f"{across} to the right{down}")
    for part in slices:
        if part.fixed:
            lines += ["", part.label()]
        cells = _cells(part, plane, rows, columns, symbols)
        edge = f"{'':{margin}} +{'-' * columns}+"
        lines.append(f"{'0' if margin else '':>{margin}}{edge[margin:]}")
        lines += [f"{'':{margin}} |{_painted(row)}|" for row in cells]
        end = f"{plane.height:,}" if margin else ""
        lines.append(f"{end:>{margin}}{edge[margin:]}")
        if plane.columns is not None:
            room = max(columns - 1, len(f" {plane.width:,}"))
            lines.append(f"{'':{margin}}  0{plane.width:>{room},}")
    if any(_SEVERAL in line for line in lines):
        lines.append(f"{_SEVERAL}: several, none of which has half")
    return lines


def _painted(row: list[str]) -> str:
    return "".join(
        click.style("".join(run), fg=_COLOURS[_SYMBOLS.index(symbol) % len(_COLOURS)])
        if symbol in _SYMBOLS
        else "".join(run)
        for symbol, run in itertools.groupby(row)
    )


def _cells(
    part: Slice, plane: Plane, rows: int, columns: int, symbols: dict[int | str, str]
) -> list[list[str]]:
    """The symbol of the owner that has most of a cell, and half of it at the least."""
    shares: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(rows)]
    for rectangle in part.rectangles:
        symbol = symbols[rectangle.box.owner]
        across = _shares(rectangle.columns, plane.width, columns)
        for row, high in _shares(rectangle.rows, plane.height, rows):
            for column, wide in across:
                share = shares[row][column]
                share[symbol] = share.get(symbol, 0.0) + high * wide
    return [[_most(share) for share in row] for row in shares]


def _shares(interval: tuple[int, int], size: int, cells: int) -> list[tuple[int, float]]:
    """The cells that an interval of `size` elements reaches into, and how much of each it has."""
    begin, end = (border * cells / size for border in interval)
    reached = range(int(begin), min(cells, int(end) + 1))
    return [
        (at, min(end, at + 1) - max(begin, at)) for at in reached if end > at and begin < at + 1
    ]


def _most(share: dict[str, float]) -> str:
    symbol = max(share, key=lambda each: share[each], default=" ")
    return symbol if share.get(symbol, 1.0) >= 0.499 else _SEVERAL
